"""Spans of gRPC calls, with the status that the call really had.

`ServerSpans` writes a SERVER span per call, below the caller's span where its metadata name one,
and makes it the current span of the handler. `client_span` writes the CLIENT span around a call
and carries it in the metadata.

How a call ended is told by gRPC in three ways: a code set or aborted with, an exception, or the
cancelling of the handler's task. The last happens both when the caller cancels and when its
deadline is met, and a caller whose deadline is met cancels a little before the server's own clock
says so: a call cancelled that near to its deadline counts as DEADLINE_EXCEEDED.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from telemetry.names import Attr
from telemetry.tracing import Attributes, Parent, context_of, end_span, start_span, traceparent_of

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

TRACEPARENT: Final = "traceparent"
UNTRACED: Final = (
    "/grpc.health.",
    "/grpc.reflection.",
    "/grpc.channelz.",
    "/opentelemetry.",
    "/baton.worker.v1.",
)
"""Probes, spans themselves, and the workers' protocol: its stream outlives requests by days, and
each message that belongs to a trace names it."""

_SERVER_FAULTS: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Codes that the RPC conventions count as an error of the server; the rest are the caller's."""
_DEADLINE_SLACK_S: Final = 0.02
_DEADLINE_ROUNDING: Final = 0.01
"""A deadline is sent as a duration rounded up, by at most this share of it."""

_KINDS: Final = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


class ServerSpans(grpc.aio.ServerInterceptor):
    """Writes a SERVER span per call of a server; put it first, around all other interceptors.

    Handlers must be coroutines or asynchronous generators; others are left as they are. To one that
    reads a stream of requests, a caller that cancels may look like one that sent its last: where
    the handler then returns without complaint, its call counts as OK.
    """

    def __init__(self, untraced: Sequence[str] = UNTRACED) -> None:
        self._untraced = tuple(untraced)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Puts the span around the handler that is found."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(self._untraced):
            return handler
        return _traced(handler, method, handler_call_details.invocation_metadata)


def _traced(handler: Handler, method: str, metadata: Any) -> Handler:
    kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
    behavior = getattr(handler, kind)
    if inspect.isasyncgenfunction(behavior):
        behavior = _traced_generator(behavior, method, metadata)
    elif inspect.iscoroutinefunction(behavior):
        behavior = _traced_coroutine(behavior, method, metadata)
    else:
        return handler
    return _KINDS[kind](behavior, handler.request_deserializer, handler.response_serializer)


def _traced_coroutine(
    behavior: Callable[[Any, Any], Awaitable[Any]], method: str, metadata: Any
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def traced(request: Any, context: Any) -> Any:
        with _server_span(method, metadata, context):
            return await behavior(request, context)

    return traced


def _traced_generator(
    behavior: Callable[[Any, Any], AsyncGenerator[Any, None]], method: str, metadata: Any
) -> Callable[[Any, Any], Awaitable[None]]:
    # Written out, not yielded on: a generator that is left while it is suspended is not told.
    async def traced(request: Any, context: Any) -> None:
        with _server_span(method, metadata, context):
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

    return traced


@contextmanager
def _server_span(method: str, metadata: Any, context: Any) -> Iterator[None]:
    span = start_span(
        method.lstrip("/"), _caller(metadata), _rpc_attributes(method), kind=SpanKind.SERVER
    )
    allowed_s = context.time_remaining()
    token = otel_context.attach(context_of(span))
    code = grpc.StatusCode.UNKNOWN
    try:
        yield
        code = context.code() or grpc.StatusCode.OK
    except (asyncio.CancelledError, grpc.aio.InternalError):
        # The latter, where the call ended while a message was on its way out.
        code = context.code() or _code_of_cancelled(allowed_s, context.time_remaining())
        raise
    except BaseException:
        code = context.code() or grpc.StatusCode.UNKNOWN
        raise
    finally:
        otel_context.detach(token)
        _end(span, code, failed=code in _SERVER_FAULTS)


def _code_of_cancelled(allowed_s: float | None, left_s: float | None) -> grpc.StatusCode:
    if allowed_s is None or left_s is None:
        return grpc.StatusCode.CANCELLED
    if left_s <= _DEADLINE_SLACK_S + allowed_s * _DEADLINE_ROUNDING:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


def _caller(metadata: Any) -> Parent:
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str):
            return value
    return None


def _rpc_attributes(method: str) -> Attributes:
    return {Attr.RPC_SYSTEM_NAME: "grpc", Attr.RPC_METHOD: method.lstrip("/")}


def _end(span: Span, code: grpc.StatusCode, *, failed: bool) -> None:
    end_span(
        span,
        attributes={Attr.RPC_RESPONSE_STATUS_CODE: code.name},
        error=code.name if failed else "",
    )


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A call under way."""

    span: Span
    metadata: tuple[tuple[str, str], ...]
    """To be sent with the call; names its span, or the caller's where nothing is recorded."""


@contextmanager
def client_span(
    method: str, name: str = "", attributes: Attributes | None = None
) -> Iterator[ClientCall]:
    """The CLIENT span around one call, below the current span; serves both kinds of stubs.

    The block must hold the whole call: for a stream, until its last message. Leaving it early, by
    cancelling or closing, is a call CANCELLED.

    Args:
        method: "/package.Service/Method".
        name: of the span, if not that of the method.
        attributes: beside those of every RPC.
    """
    parent = otel_context.get_current()
    span = start_span(
        name or method.lstrip("/"),
        parent,
        {**_rpc_attributes(method), **(attributes or {})},
        kind=SpanKind.CLIENT,
    )
    traceparent = traceparent_of(span)
    metadata = ((TRACEPARENT, traceparent),) if traceparent else ()
    code = grpc.StatusCode.UNKNOWN
    try:
        with trace.use_span(span, False, False, False):
            yield ClientCall(span, metadata)
        code = grpc.StatusCode.OK
    except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        code = grpc.StatusCode.CANCELLED
        raise
    except grpc.RpcError as error:
        code = _code_of(error)
        raise
    finally:
        _end(span, code, failed=code is not grpc.StatusCode.OK)


def _code_of(error: grpc.RpcError) -> grpc.StatusCode:
    code = error.code() if callable(getattr(error, "code", None)) else None
    return code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN
