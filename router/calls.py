"""The edge of the gRPC API: what a method is given, and what may leave it.

Methods are plain coroutines and generators of (request, `Call`). Around each one stands the only
place where errors become statuses. Without it gRPC answers bytes that do not parse with UNKNOWN and
the name of a Python class, and any exception with its text.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, NoReturn, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from opentelemetry import context as otel_context
from opentelemetry.context import Context

from router import errors
from telemetry.tracing import trace_id_of

DETAILS_KEY: Final = "grpc-status-details-bin"
PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
"""When a channel that retries by itself may send the call again; negative: not at all."""
MAX_PUSHBACK_S: Final = 5.0
"""A longer wait is not the channel's to sit out unseen: its caller is told, with RetryInfo."""
_MALFORMED: Final = object()
"""Stands for a request whose bytes did not parse."""

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a front door's method."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Trace id of the call's span, 32 hex digits; random where nothing is traced."""
    arrived_ns: int = field(default_factory=time.time_ns)
    time_left_s: float | None = None
    """Until the caller's deadline; None where there is none."""
    context: Context = field(default_factory=Context)
    """Holds the span of the call."""


class ServerContext(Protocol):
    """What is used of `grpc.aio.ServicerContext`."""

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline."""
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


def unary_method(
    request_type: type[Request], method: Callable[[Request, Call], Awaitable[Response]]
) -> grpc.RpcMethodHandler[Request, Response]:
    """Handler of a method with one response."""

    async def handle(request: Request, context: ServerContext) -> Response:
        call = _call(context)
        try:
            return await method(_parsed(request), call)
        except asyncio.CancelledError as error:
            await _abort_unless_ours(error, context, call)
        except Exception as error:
            await _abort(error, context, call)

    return grpc.unary_unary_rpc_method_handler(
        handle, request_deserializer=_parser(request_type), response_serializer=_serialize
    )


def stream_method(
    request_type: type[Request],
    method: Callable[[Request, Call], AsyncGenerator[Response, None]],
) -> grpc.RpcMethodHandler[Request, Response]:
    """Handler of a method with a stream of responses; `method` is closed however the call ends."""

    async def handle(request: Request, context: ServerContext) -> None:
        call = _call(context)
        try:
            async with aclosing(method(_parsed(request), call)) as responses:
                async for response in responses:
                    await _write(response, context)
        except _CallerLeftError:
            raise asyncio.CancelledError from None
        except asyncio.CancelledError as error:
            await _abort_unless_ours(error, context, call)
        except Exception as error:
            await _abort(error, context, call)

    return grpc.unary_stream_rpc_method_handler(
        handle, request_deserializer=_parser(request_type), response_serializer=_serialize
    )


class _CallerLeftError(Exception):
    """Nobody reads the stream any more."""


async def _write(response: Message, context: ServerContext) -> None:
    """Sends one message.

    A caller that leaves cancels the handler's task; but where a write is in flight it may fail
    first, with one of gRPC's own errors.

    Raises:
        _CallerLeftError: there is no one to send it to.
    """
    try:
        await context.write(response)
    except (grpc.aio.InternalError, grpc.aio.UsageError):
        raise _CallerLeftError from None


def _call(context: ServerContext) -> Call:
    current = otel_context.get_current()
    return Call(
        id=trace_id_of(current) or uuid.uuid4().hex,
        time_left_s=context.time_remaining(),
        context=current,
    )


def _parser(message_type: type[Request]) -> Callable[[bytes], Request]:
    def parse(data: bytes) -> Request:
        try:
            return message_type.FromString(data)
        except DecodeError:
            return cast("Request", _MALFORMED)

    return parse


def _parsed(request: Request) -> Request:
    if request is _MALFORMED:
        raise errors.malformed_request()
    return request


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


async def _abort_unless_ours(
    error: asyncio.CancelledError, context: ServerContext, call: Call
) -> NoReturn:
    """The caller's cancellation goes on; one that leaked out of something inside is a bug."""
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise error
    await _abort(error, context, call)


async def _abort(error: BaseException, context: ServerContext, call: Call) -> NoReturn:
    described = errors.describe(error, call.id)
    status = errors.to_status(described, call.id)
    trailers: tuple[tuple[str, str | bytes], ...] = ((DETAILS_KEY, status.SerializeToString()),)
    if described.retry_after_s is not None:
        trailers += ((PUSHBACK_KEY, _pushback_ms(described.retry_after_s)),)
    await context.abort(described.code, described.message, trailers)


def _pushback_ms(retry_after_s: float) -> str:
    return str(math.ceil(retry_after_s * 1e3) if retry_after_s <= MAX_PUSHBACK_S else -1)
