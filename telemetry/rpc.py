"""Writes spans of gRPC calls, with the call's true status.

`ServerSpans` writes a SERVER span a call and makes it the current span of the handler. If the
call's metadata name a span of the caller, that one is the parent.

A call can end in three ways: with a code that the handler set or aborted with, with an exception,
or by cancelling the handler's task. gRPC cancels the task when the caller cancels and also when the
deadline passes. A caller may notice its deadline a little before the server does. So a call that is
cancelled shortly before its deadline counts as DEADLINE_EXCEEDED.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
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
"""Calls without a span: probes, exports of spans, and the workers' protocol. A worker's stream
lives for days, and each of its messages names its trace itself."""

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
"""Codes that the RPC conventions count as the server's errors; others are the caller's."""
_DEADLINE_SLACK_S: Final = 0.02
_DEADLINE_ROUNDING: Final = 0.01
"""Callers send a deadline as a duration, rounded up by at most this share."""

_KINDS: Final = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


class ServerSpans(grpc.aio.ServerInterceptor):
    """Writes a SERVER span for each call of a server. Put it first, around other interceptors.

    Handlers must be coroutines that write their streams with `context.write`; others get no span. A
    handler that reads a stream of requests may take a cancellation for the end of the stream. If it
    then returns normally, its call counts as OK.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Puts the span around the call's handler."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(UNTRACED):
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
        # InternalError: the call ended while a message was being written.
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
