"""One call at the fast door: what a handler of gRPC sees of it.

Life of a call:

1. Its headers came, and its task begins. Who shows no token is refused before the message is read.
2. Its message came. It is counted against the bounds as it comes (`router.doors.http.bodies`).
3. The handler runs, the one that answers at the ordinary door. Messages go out as windows allow.
   A token may take the short way: `take` writes it within the handler of a worker's message.
4. It ends with a status in its trailers; or without one, because the client has left.

A call that is dropped counts for its connection until its task has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, cast

import grpc
from h2.errors import ErrorCodes

from baton.grpc_options import PUBLIC_MESSAGE_BYTES
from router import errors
from router.doors.grpc_edge import Refused
from router.doors.http.bodies import paced
from router.doors.http2 import heads
from router.doors.http2.frames import MOST_FRAME_BYTES, PREFIX_BYTES, Kind, frame, message_frame
from router.doors.straight import MOST_WAITING_BYTES

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from h2.stream import H2Stream

    from router.doors.http.bodies import Bodies, Body
    from router.doors.http2.outgoing import Outgoing

logger = logging.getLogger(__name__)

Metadata = Sequence[tuple[str, str | bytes]]
MOST_SHORT_BYTES: Final = MOST_FRAME_BYTES - PREFIX_BYTES
"""Most bytes of a message that goes out in one frame."""


class Details(NamedTuple):
    """A call before it is handled, as `grpc.HandlerCallDetails` has it."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...]


class Service(Protocol):
    """The part of the door that a call uses (`server`)."""

    bodies: Bodies

    def handler(self, details: Details) -> Awaitable[grpc.RpcMethodHandler[Any, Any] | None]:
        """What answers a call; None if the door has no such method."""
        ...

    def unknown(self) -> str:
        """What to say of a method that the door does not have."""
        ...


class CallersConnection(Protocol):
    """The part of a connection that a call uses (`connection`)."""

    out: Outgoing
    peer: str
    """The other end, as gRPC writes it."""

    @property
    def owner(self) -> Service:
        """The door."""
        ...

    def ended(self, call: GrpcCall) -> None:
        """The task of a call has ended."""
        ...


class _EndedError(Exception):
    """The call has its status."""


class _BadMessageError(Exception):
    """The bytes are no message that gRPC lets through."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class GrpcCall:
    """A call, and its `router.doors.grpc_edge.ServerContext`."""

    def __init__(self, connection: CallersConnection, stream: H2Stream) -> None:
        self.stream_id = stream.stream_id
        self._connection = connection
        self._out = connection.out
        self._stream = stream
        self._head: heads.Head
        self._began_s = asyncio.get_running_loop().time()
        self._task: asyncio.Task[None]
        self._request = _Request()
        self._begun = False
        """Whether the head of the answer is out."""
        self._over = False
        """Whether nothing may be sent any more."""
        self._code: grpc.StatusCode | None = None

    def start(self, head: heads.Head) -> None:
        """Begins to answer."""
        self._head = head
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda _: self._connection.ended(self))

    # What its connection tells it.

    def came(self, data: bytes) -> None:
        """Bytes of the request came."""
        self._request.add(data)

    def came_all(self) -> None:
        """The request is complete."""
        self._request.end()

    def drop(self) -> None:
        """The client has left."""
        self._over = True
        self._task.cancel()

    def refuse(self, code: grpc.StatusCode, message: str) -> None:
        """Ends the call with a status."""
        if self._over:
            return
        self._end(code, message)

    # What its handler sees.

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline."""
        if self._head.timeout_s is None:
            return None
        passed_s = asyncio.get_running_loop().time() - self._began_s
        return max(0.0, self._head.timeout_s - passed_s)

    def peer(self) -> str:
        """The other end of the connection."""
        return self._connection.peer

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The caller's metadata."""
        return self._head.metadata

    def code(self) -> grpc.StatusCode | None:
        """The status, once it is known."""
        return self._code

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """Ends the call with a status."""
        self._code = code
        if not self._over:
            self._end(code, details, trailing_metadata)
        raise _EndedError

    async def write(self, message: Message) -> None:
        """Sends a message; returns when the connection has taken it."""
        data = message.SerializeToString()
        if not self._begun:
            self._begun = True
            self._out.headers(self.stream_id, heads.begin(), last=False)
        if not self.take(data):
            await self._send_in_parts(b"\0" + len(data).to_bytes(4, "big") + data)

    @property
    def short_way(self) -> GrpcCall:
        """The short way to the client."""
        return self

    def take(self, message: bytes) -> bool:
        """Sends a message now; False if there is no room for it."""
        size = len(message) + PREFIX_BYTES
        out = self._out
        if (
            self._over
            or size > out.window(self._stream)
            or len(message) > MOST_SHORT_BYTES
            or out.waiting_bytes > MOST_WAITING_BYTES
        ):
            return False
        out.data(self._stream, message_frame(self.stream_id, message), size)
        return True

    # Its own.

    async def _send_in_parts(self, data: bytes) -> None:
        at, out = 0, self._out
        try:
            while at < len(data):
                room = min(out.window(self._stream), MOST_FRAME_BYTES)
                if room <= 0:
                    await out.room(self._stream)
                    continue
                part = data[at : at + room]
                at += len(part)
                sent = frame(Kind.DATA, 0, self.stream_id, part)
                out.data(self._stream, sent, len(part), last=at == len(data))
        finally:  # What this call does not take is for others.
            out.wake()

    async def _run(self) -> None:
        try:
            await self._serve()
            if not self._over:
                self._end(grpc.StatusCode.OK)
        except _EndedError:
            pass
        except asyncio.CancelledError:  # The client left, or did not read until the end.
            if not self._over:
                self._over = True
                self._out.reset(self.stream_id, ErrorCodes.CANCEL)
        except Exception as error:
            # The handlers turn their own errors into statuses, so this one is a defect.
            logger.error("a call failed", extra={"cause": type(error).__name__})
            if not self._over:
                self._end(grpc.StatusCode.INTERNAL, "internal error")

    async def _serve(self) -> None:
        owner, head = self._connection.owner, self._head
        handler = await owner.handler(Details(head.method, head.metadata))
        if handler is None:
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, owner.unknown())
        if handler.stream_stream is not None:  # It refuses the caller, and reads nothing.
            await handler.stream_stream(self, self)  # type: ignore[arg-type, misc]
            return
        with owner.bodies.one() as body:
            request = await self._read(handler, body)
        if handler.unary_stream is not None:
            await handler.unary_stream(request, cast("Any", self))  # type: ignore[misc]
        else:
            assert handler.unary_unary is not None
            await self.write(await handler.unary_unary(request, cast("Any", self)))

    async def _read(self, handler: grpc.RpcMethodHandler[Any, Any], body: Body) -> Any:
        try:
            data = await self._request.read(body)
        except errors.RouterError as error:
            return Refused(error)
        except _BadMessageError as error:
            await self.abort(error.code, error.message)
        assert handler.request_deserializer is not None
        return handler.request_deserializer(data)

    def _end(self, code: grpc.StatusCode, message: str = "", metadata: Metadata = ()) -> None:
        self._over, self._code = True, code
        trailers = heads.end(code, message, metadata)
        if not self._begun:
            trailers = heads.begin() + trailers
        self._out.headers(self.stream_id, trailers, last=True)


class _Request:
    """The one message of a call, as its bytes come."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        """What came and was not looked at."""
        self._prefix = b""
        self._missing: int | None = None
        """Bytes of the message that did not come; unknown before its prefix."""
        self._is_whole = False
        self._is_left = False
        """What comes now is dropped: nobody wants it."""
        self._came: asyncio.Future[None] | None = None

    def add(self, data: bytes) -> None:
        """Bytes came."""
        if data and not self._is_left:
            self._waiting.append(data)
            self._wake()

    def end(self) -> None:
        """No more bytes come."""
        self._is_whole = True
        self._wake()

    async def read(self, body: Body) -> bytes:
        """Reads the message.

        Raises:
            RouterError: it is larger than any prompt, came too slowly, or others fill the budget.
            _BadMessageError: it is not one message as it is.
        """
        try:
            async with paced() as came:
                while not self._is_whole or self._waiting:
                    if not self._waiting:
                        self._came = asyncio.get_running_loop().create_future()
                        await self._came
                    parts, self._waiting = self._waiting, []
                    for part in parts:
                        self._look(part, body)
                        came(len(part))
        finally:
            self._is_left = True
            self._waiting.clear()
        if self._missing != 0:
            raise _cardinality()
        return body.take()

    def _look(self, part: bytes, body: Body) -> None:
        """Adds bytes to the body, without the prefix."""
        if self._missing is None:
            rest = PREFIX_BYTES - len(self._prefix)
            self._prefix, part = self._prefix + part[:rest], part[rest:]
            if len(self._prefix) < PREFIX_BYTES:
                return
            self._missing = _announced(self._prefix)
            body.expect(self._missing)
        if len(part) > self._missing:
            raise _cardinality()
        self._missing -= len(part)
        body.add(part)

    def _wake(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)


def _announced(head: bytes) -> int:
    """Bytes of a message, by its prefix."""
    size = int.from_bytes(head[1:], "big")
    if head[0]:
        raise _BadMessageError(
            grpc.StatusCode.INTERNAL, "a message is compressed, and grpc-encoding does not say how"
        )
    if size > PUBLIC_MESSAGE_BYTES:
        raise _BadMessageError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the message has {size} bytes, more than {PUBLIC_MESSAGE_BYTES}",
        )
    return size


def _cardinality() -> _BadMessageError:
    return _BadMessageError(grpc.StatusCode.UNIMPLEMENTED, "the method takes exactly one message")
