"""The HTTP edge: one `HttpEndpoint` for each method that generates.

Life of a request:

1. A SERVER span begins, below the caller's if `traceparent` names one. Its trace id is the answer's
   `x-request-id`. The token is checked. Then the whole body is read (`bodies`).
2. The method makes an `Answer` of it. The status is sent only with the first part of the answer, in
   a stream the first token, so a refused request gets its own status.
3. The answer goes out at the client's pace. A stream that is silent for long shows that it lives by
   a comment, which begins its answer if nothing else has. An error after that is its last event. A
   complete stream ends as the API's `Dialect` says.
4. A client that leaves cancels the work at once, at any point, and counts as 499. A client that
   stays and does not read loses its connection a little after the deadline.
5. The access log gets one line.

Errors of these methods become statuses only here.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from opentelemetry.trace import SpanKind
from starlette.requests import ClientDisconnect, Request

from router import errors
from router.call import NO_PEER, AccessRecord, Call, Peer
from router.doors.auth import Gate
from router.doors.http.bodies import Bodies, Body
from router.doors.http.connections import connection_of
from router.doors.http.dialect import CHATS, Dialect
from router.doors.http.statuses import CLIENT_LEFT, JSON, http_status, retry_headers
from router.doors.straight import Straight, chunk_of
from router.one_line import json_of
from router.requests.deadlines import UnreadError, read_by
from router.requests.validation import MAX_CLIENT_TAG_BYTES
from telemetry.names import Attr
from telemetry.rpc import TRACEPARENT
from telemetry.tracing import context_of, end_span, start_span, trace_id_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from router.events import RouterEvents

REQUEST_ID: Final = "x-request-id"
"""Header. In a request it is the caller's own tag, for logs. In an answer it is the trace id."""
_JSON_TYPE: Final = "application/json"
_EVENTS_TYPE: Final = "text/event-stream; charset=utf-8"
SILENT_S: Final = 5.0
"""A stream that has sent nothing for so long sends a comment. Proxies cut silent connections, most
after a minute."""
STILL_SILENT_S: Final = 10.0
"""Time to the next comments."""
COMMENT: Final = b": keepalive\n\n"


class Answer(Protocol):
    """The answer of a method: `chunks` if `stream` is set, else `whole`."""

    stream: bool
    straight: Straight | None
    """Set before `chunks` is called; None if every chunk goes the usual way."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Further headers, complete when the first part is there."""
        ...

    async def whole(self) -> JSON:
        """All of it."""
        ...

    def chunks(self) -> AsyncGenerator[JSON, None]:
        """The answer in parts, one event each."""
        ...

    def failure(self, error: JSON) -> JSON:
        """The last event of a stream that fails, for an error in the form of its dialect."""
        ...


Method = Callable[[bytes, Call, str], Awaitable[Answer]]
"""Takes (body, call, the caller's tag); may raise any RouterError."""


class Guards(NamedTuple):
    """The checks of a request before its method, and the limit of its answer."""

    bodies: Bodies
    gate: Gate
    longest_s: float
    """Time from a request's arrival to its deadline."""


class HttpEndpoint:
    """An ASGI application around one method."""

    def __init__(
        self,
        route: str,
        method: Method,
        guards: Guards,
        events: RouterEvents,
        dialect: Dialect = CHATS,
    ) -> None:
        self._dialect = dialect
        self._route = route
        self._method = method
        self._guards = guards
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        response = _Response(self._route, Request(scope, receive), send, self._dialect)
        try:
            async with read_by(self._guards.longest_s):
                await self._answer(response)
        except UnreadError:
            self._events.unread()
            response.give_up()
            response.connection.abort()
        finally:
            response.close()

    async def _answer(self, response: _Response) -> None:
        try:
            response.admit(self._guards.gate)
            with self._guards.bodies.one() as body:
                await body.read(response.request)
                async with _while_there(response):
                    await self._serve(body, response)
        except ClientDisconnect:
            response.status = CLIENT_LEFT
        except Exception as error:
            if isinstance(error, errors.RouterError) and response.answer is None:
                self._events.rejected(error.reason)
            await response.fail(error)

    async def _serve(self, body: Body, response: _Response) -> None:
        call = response.call
        answer = await self._method(body.take(), call, call.record.client_tag)
        body.let_go()
        response.answer = answer
        await asyncio.sleep(0)  # A callback to read the request, another to run it.
        if not answer.stream:
            content = await answer.whole()
            await response.whole(content, answer.headers)
            return
        response.headers = answer.headers
        answer.straight = response.straight
        with response.kept_alive():
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    await response.event(chunk)
        await response.end()


class _Response:
    """The outgoing response, and its records in span and access log."""

    def __init__(self, route: str, request: Request, send: Send, dialect: Dialect) -> None:
        self.request = request
        self._dialect = dialect
        self._send = send
        self._error = ""
        self._span = start_span(
            f"{request.method} {route}",
            request.headers.get(TRACEPARENT),
            {Attr.HTTP_REQUEST_METHOD: request.method, Attr.HTTP_ROUTE: route},
            kind=SpanKind.SERVER,
        )
        context = context_of(self._span)
        self.call = Call(
            id=trace_id_of(context) or uuid.uuid4().hex,
            context=context,
            record=AccessRecord(
                method=f"{request.method} {route}", client_tag=_client_tag(request)
            ),
            peer=Peer.of(*request.client) if request.client else NO_PEER,
        )
        self.answer: Answer | None = None
        """Set when the method took the request. From then on the generations count refusals."""
        self.status = 0
        """Set when the answer begins; 0 before."""
        self.complete = False
        self.headers: Mapping[str, str] = {}
        """Further headers of a stream."""
        self._writing = asyncio.Lock()
        """Held while a part of the stream is written. A client that reads nothing holds it up."""
        self.connection = connection_of(request.scope)
        self.straight = Straight(self.connection, self._writing, dialect.event)
        self._look: asyncio.TimerHandle | None = None
        """The next look whether the stream is silent."""
        self._comment: asyncio.Task[None] | None = None

    def admit(self, gate: Gate) -> None:
        """Admits the caller.

        Raises:
            RouterError: UNAUTHENTICATED.
        """
        authorization = self._dialect.authorization(self.request.headers)
        self.call = self.call.admitted(gate.caller_of(authorization))

    async def whole(self, content: JSON, headers: Mapping[str, str], status: int = 200) -> None:
        """Sends a whole answer."""
        body = json_of(content)
        with self.connection.together():
            await self._begin(status, _JSON_TYPE, {**headers, "content-length": str(len(body))})
            await self._write(body, last=True)

    async def event(self, content: JSON) -> None:
        """Sends an event of a stream; returns when the connection has taken it."""
        async with self._writing:
            await self._part(self._dialect.event(content))
        self.straight.wrote_s = time.monotonic()

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Sends a comment whenever the stream has been silent for long."""
        self.straight.wrote_s = time.monotonic()
        self._look_in(SILENT_S)
        self.connection.filler = chunk_of(COMMENT)
        try:
            yield
        finally:
            self.connection.filler = b""
            for under_way in (self._look, self._comment):
                if under_way is not None:
                    under_way.cancel()

    def _look_in(self, seconds: float) -> None:
        self._look = asyncio.get_running_loop().call_later(seconds, self._break_silence)

    def _break_silence(self) -> None:
        rest_s = self.straight.wrote_s + SILENT_S - time.monotonic()
        if self._writing.locked():
            self._look_in(SILENT_S)
        elif rest_s > 0:
            self._look_in(rest_s)
        else:
            self._comment = asyncio.create_task(self._write_comment())
            self._look_in(STILL_SILENT_S)

    async def _write_comment(self) -> None:
        async with self._writing:
            await self._part(COMMENT)

    async def _part(self, data: bytes) -> None:
        """Sends a part of a stream, and before the first one its headers."""
        with self.connection.together():
            if not self.status:
                await self._begin(200, _EVENTS_TYPE, {"cache-control": "no-cache", **self.headers})
                self.straight.begun = self.request.scope["http_version"] == "1.1"
            await self._write(data)

    async def end(self) -> None:
        """Ends a complete stream."""
        async with self._writing:
            with self.connection.together():
                await self._part(self._dialect.last)
                await self._write(b"", last=True)

    async def fail(self, error: Exception) -> None:
        """Sends an error as a status, or as an event once the stream has begun, and notes it."""
        described = errors.describe(error, self.call.id)
        self._error, status = described.reason, http_status(described)
        content = self._dialect.error(described, self.call.id)
        if self.status:
            assert self.answer is not None, "only an answer begins a stream"
            await self.event(self.answer.failure(content))
            await self._write(b"", last=True)
        else:
            await self.whole(content, retry_headers(described), status)

    def give_up(self) -> None:
        """Notes that the client did not read its answer by the deadline."""
        self._error = errors.deadline_exceeded(self.call.record.output_tokens).reason

    def close(self) -> None:
        """Ends the span, and writes the request's line in the access log."""
        status = self.status or CLIENT_LEFT
        failed = status >= 500 or (status == 200 and self._error)
        end_span(
            self._span,
            attributes={Attr.HTTP_RESPONSE_STATUS_CODE: status},
            error=self._error if failed else "",
        )
        left = "" if self.complete else "CANCELLED"
        self.call.record.write(self.call.id, self.call.arrived_ns, status, self._error or left)

    async def _begin(self, status: int, media_type: str, headers: dict[str, str]) -> None:
        self.status = status
        own = {"content-type": media_type, REQUEST_ID: self.call.id}
        fields = {**own, **self._dialect.headers(self.call.id), **headers}
        encoded = [(name.encode(), value.encode()) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write(self, data: bytes, last: bool = False) -> None:
        self.complete = last
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})


def _client_tag(request: Request) -> str:
    tag = request.headers.get(REQUEST_ID, "").encode()[:MAX_CLIENT_TAG_BYTES]
    return tag.decode(errors="ignore")


@asynccontextmanager
async def _while_there(response: _Response) -> AsyncIterator[None]:
    """Wraps work that is cancelled at once if the client leaves before its answer is complete.

    Raises:
        ClientDisconnect: the client left.
    """
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    def leave() -> None:
        nonlocal has_left
        if not response.complete and not has_left:
            has_left = True
            task.cancel()

    response.connection.when_lost(leave)
    try:
        yield
    except asyncio.CancelledError:
        if has_left and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        response.connection.when_lost(None)
