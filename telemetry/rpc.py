"""Spans of gRPC calls, with the status that the call really had.

`ServerSpans` writes a SERVER span per call, below the caller's span where its metadata name one,
and makes it the current span of the handler.

How a call ended is told by gRPC in three ways: a code set or aborted with, an exception, or the
cancelling of the handler's task. The last happens both when the caller cancels and when its
deadline is met, and a caller whose deadline is met cancels a little before the server's own clock
says so: a call cancelled that near to its deadline counts as DEADLINE_EXCEEDED.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio
from opentelemetry import context as otel_context
from opentelemetry.trace import Span, SpanKind

from telemetry.names import Attr
from telemetry.tracing import Attributes, Parent, context_of, end_span, start_span

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

    Handlers must be coroutines, which write their streams by `context.write`; others are left as
    they are. To one that reads a stream of requests, a caller that cancels may look like one that
    sent its last: where the handler then returns without complaint, its call counts as OK.
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
    if not inspect.iscoroutinefunction(behavior):
        return handler

    async def traced(request: Any, context: Any) -> Any:
        with _server_span(method, metadata, context):
            return await behavior(request, context)

    return _KINDS[kind](traced, handler.request_deserializer, handler.response_serializer)


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
