"""The edge of the gRPC API: checks before a method, statuses after it.

Methods are plain coroutines and generators of (request, `Call`). An `Edge` wraps each one, and is
the only place where errors become statuses. Without it gRPC would answer bytes that do not parse
with UNKNOWN and the name of a Python class, and any exception with its text.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar, cast
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from opentelemetry import context as otel_context

from router import errors
from router.call import MACHINES, AccessRecord, Call, MessageWay, Peer
from router.doors.auth import AUTHORIZATION, OPEN, Gate
from router.events import NO_EVENTS, RouterEvents
from router.requests.deadlines import UnreadError, read_by
from telemetry.tracing import trace_id_of

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

    from router.requests.bounds import BodyShape

DETAILS_KEY: Final = "grpc-status-details-bin"
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
"""Trailer with the wait before a channel may retry by itself; a negative value forbids it."""
MAX_PUSHBACK_S: Final = 5.0
"""Longest wait that a channel sits out by itself, seconds. For a longer one the caller gets
RetryInfo."""

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class ServerContext(Protocol):
    """The part of `grpc.aio.ServicerContext` that is used here."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline."""
        ...

    def peer(self) -> str:
        """The other end of the connection, as gRPC writes it."""
        ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """The metadata that the caller sent with the request."""
        ...

    async def write(self, message: Message) -> None:
        """Sends one message of a stream; returns when the connection has taken it."""
        ...

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str,
        trailing_metadata: tuple[tuple[str, str | bytes], ...],
    ) -> NoReturn:
        """Ends the call with a status."""
        ...


UnaryMethod = Callable[[Request, Call], Awaitable[Response]]
StreamMethod = Callable[[Request, Call], AsyncGenerator[Response, None]]


class Edge:
    """Wraps every method: admits the caller, converts errors, writes the access log.

    Args:
        shape: checks the bytes of requests.
        longest_s: the longest deadline, and that of calls without one.
        gate: checks the callers' tokens.
        events: receives refusals, and answers that nobody read.
    """

    def __init__(
        self,
        shape: BodyShape,
        longest_s: float,
        gate: Gate = OPEN,
        events: RouterEvents = NO_EVENTS,
    ) -> None:
        self._shape = shape
        self._longest_s = longest_s
        self._gate = gate
        self._events = events

    def service(
        self, name: str, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> grpc.GenericRpcHandler:
        """The handler of a service for a server: its methods, by name, behind the gate."""
        return _Service(name, methods, self)

    def stopped(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler that refuses a caller; None if the caller may call. Only the headers of a
        caller without a token are read."""
        try:
            self._gate.caller_of(_authorization(details.invocation_metadata))
        except errors.RouterError as error:
            return self._refusing(details.method.lstrip("/"), error)
        return None

    def _refusing(self, name: str, error: errors.RouterError) -> grpc.RpcMethodHandler[Any, Any]:
        """Handler that refuses every call. It is a stream handler for any method, so that no
        message is read."""
        refused = Refused(error)

        async def handle(_: object, context: ServerContext) -> None:
            async with self._around(name, refused, context):
                pass

        return grpc.stream_stream_rpc_method_handler(handle)

    def unary(
        self, name: str, request_type: type[Request], method: UnaryMethod[Request, Response]
    ) -> grpc.RpcMethodHandler[Request, Response]:
        """Handler of a method with one response."""

        async def handle(request: Request, context: ServerContext) -> Response:
            async with self._around(name, request, context) as call:
                return await method(request, call)

        return grpc.unary_unary_rpc_method_handler(
            handle, request_deserializer=self._parser(request_type), response_serializer=_serialize
        )

    def stream(
        self, name: str, request_type: type[Request], method: StreamMethod[Request, Response]
    ) -> grpc.RpcMethodHandler[Request, Response]:
        """Handler of a method with a stream of responses. It always closes `method`."""

        async def handle(request: Request, context: ServerContext) -> None:
            async with (
                self._read_in_time(),
                self._around(name, request, context) as call,
                aclosing(method(request, call.with_way(_way_of(context)))) as responses,
            ):
                async for response in responses:
                    await _write(response, context)

        return grpc.unary_stream_rpc_method_handler(
            handle, request_deserializer=self._parser(request_type), response_serializer=_serialize
        )

    @asynccontextmanager
    async def _read_in_time(self) -> AsyncIterator[None]:
        """Wraps a stream: its caller may read until a little after the deadline. gRPC cannot end a
        call while a message waits to be read. Such a call ends with its connection, at the bound on
        the connection's age, and holds no other resources until then."""
        try:
            async with read_by(self._longest_s):
                yield
        except UnreadError:
            self._events.unread()
            raise asyncio.CancelledError from None

    @asynccontextmanager
    async def _around(
        self, name: str, request: object, context: ServerContext
    ) -> AsyncIterator[Call]:
        """Wraps one call: admits it, turns an error into a status, and logs it."""
        call = _call(name, context, self._longest_s)
        ended: errors.RouterError | None = None
        try:
            yield self._admitted(call, request, context)
        except (_CallerLeftError, asyncio.CancelledError) as error:
            if not _is_ours(error):
                ended = call.left()
                raise asyncio.CancelledError from None
            ended = errors.describe(error, call.id)
            await _abort(ended, context, call)
        except Exception as error:
            ended = errors.describe(error, call.id)
            await _abort(ended, context, call)
        finally:
            code = grpc.StatusCode.OK if ended is None else ended.code
            call.record.write(call.id, call.arrived_ns, code.name, ended.reason if ended else "")

    def _admitted(self, call: Call, request: object, context: ServerContext) -> Call:
        """The call, with its tenant.

        Raises:
            RouterError: UNAUTHENTICATED or MALFORMED_REQUEST.
        """
        try:
            if isinstance(request, Refused):
                raise request.error
            caller = self._gate.caller_of(_authorization(context.invocation_metadata()))
        except errors.RouterError as error:
            self._events.rejected(error.reason)
            raise
        return call.admitted(caller)

    def _parser(self, message_type: type[Request]) -> Callable[[bytes], Request]:
        """Parser from bytes to a message. Bytes that are refused become a `Refused`, because
        gRPC's own answer would carry no reason."""

        kind = cast("Descriptor", message_type.DESCRIPTOR)

        def parse(data: bytes) -> Request:
            try:
                self._shape.check_message(data, kind)
                return message_type.FromString(data)
            except errors.RouterError as error:
                return cast("Request", Refused(error))
            except DecodeError:
                return cast("Request", Refused(errors.malformed_request()))

        return parse


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands for a request that was not parsed, or not read."""

    error: errors.RouterError


class _Service(grpc.GenericRpcHandler):
    """Methods behind an edge's gate."""

    def __init__(
        self, name: str, methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]], edge: Edge
    ) -> None:
        self._methods = {f"/{name}/{method}": handler for method, handler in methods.items()}
        self._edge = edge

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a call."""
        handler = self._methods.get(handler_call_details.method)
        return handler and (self._edge.stopped(handler_call_details) or handler)


class _CallerLeftError(Exception):
    """The caller is gone and reads no more of the stream."""


async def _write(response: Message, context: ServerContext) -> None:
    """Sends one message.

    A caller that leaves cancels the handler's task. A write in flight may fail before that, with
    one of gRPC's own errors.

    Raises:
        _CallerLeftError: the caller is gone.
    """
    try:
        await context.write(response)
    except (grpc.aio.InternalError, grpc.aio.UsageError):
        raise _CallerLeftError from None


def _call(name: str, context: ServerContext, longest_s: float) -> Call:
    current = otel_context.get_current()
    return Call(
        id=trace_id_of(current) or uuid.uuid4().hex,
        time_left_s=context.time_remaining(),
        longest_s=longest_s,
        context=current,
        record=AccessRecord(method=name),
        peer=_peer(context.peer()),
    )


@lru_cache(MACHINES)
def _peer(named: str) -> Peer:
    """The peer that gRPC names, such as `ipv4:10.0.0.1:54321` or `ipv6:%5B::1%5D:54321`."""
    host, _, port = unquote(named).partition(":")[2].rpartition(":")
    return Peer.of(host.strip("[]"), int(port) if port.isdecimal() else 0)


def _way_of(context: ServerContext) -> MessageWay | None:
    """The short way to a caller; gRPC's own server has none."""
    return getattr(context, "short_way", None)


def _authorization(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    found = [value for key, value in metadata or () if key == AUTHORIZATION]
    return str(found[-1]) if found else None


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _is_ours(error: BaseException) -> bool:
    """Whether a cancellation came from inside and not from the caller."""
    task = asyncio.current_task()
    cancelled = isinstance(error, asyncio.CancelledError)
    return cancelled and task is not None and not task.cancelling()


async def _abort(described: errors.RouterError, context: ServerContext, call: Call) -> NoReturn:
    status = errors.to_status(described, call.id)
    trailers: tuple[tuple[str, str | bytes], ...] = ((DETAILS_KEY, status.SerializeToString()),)
    if described.retry_after_s is not None:
        trailers += ((PUSHBACK_KEY, _pushback_ms(described.retry_after_s)),)
    await context.abort(described.code, described.message, trailers)


def _pushback_ms(retry_after_s: float) -> str:
    return str(math.ceil(retry_after_s * 1e3) if retry_after_s <= MAX_PUSHBACK_S else -1)
