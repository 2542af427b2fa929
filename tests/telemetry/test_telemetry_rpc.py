"""Spans of real grpc.aio calls: parents, and the status that each call really had."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import grpc
import grpc.aio
import pytest
from opentelemetry import context as otel_context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from waiting import until

from telemetry.names import Attr, Service, undeclared
from telemetry.rpc import ServerSpans
from telemetry.tracing import Tracing, end_span, setup_tracing, start_span

SERVICE = "baton.test.v1.EchoService"
SECRET = b"prompt text"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DEADLINES_S = (0.15, 2.0, 10.0)
"""One is tried after the other, until the call has reached its handler before its deadline."""
waiting: list[bytes] = []
"""Calls of this test that have reached their handler, to be answered never."""
heard: set[bytes] = set()
"""Messages of streams that the caller in this test has got."""


class Memory:
    """What was exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        tracing = setup_tracing(Service.ROUTER, exporter=self.exporter)
        assert tracing is not None
        self.tracing: Tracing = tracing

    async def one(self, kind: SpanKind) -> ReadableSpan:
        """The only span of this kind, as soon as it ended."""
        (found,) = await until(lambda: self.all(kind))
        return found

    def forget(self) -> None:
        """What was exported until now."""
        self.tracing.flush()
        self.exporter.clear()

    def all(self, kind: SpanKind) -> list[ReadableSpan]:
        self.tracing.flush()
        return [span for span in self.exporter.get_finished_spans() if span.kind is kind]


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.tracing.shutdown()


@pytest.fixture(autouse=True)
def none_waits() -> None:
    waiting.clear()
    heard.clear()


async def unary(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    match request:
        case b"abort":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
        case b"internal":
            await context.abort(grpc.StatusCode.INTERNAL, "bug")
        case b"raise":
            raise ValueError(SECRET.decode())
        case b"set":
            context.set_code(grpc.StatusCode.NOT_FOUND)
        case b"forever":
            waiting.append(request)
            await asyncio.Event().wait()
    end_span(start_span("router.admit", otel_context.get_current()))
    return request


async def written(request: bytes, context: grpc.aio.ServicerContext) -> None:
    await context.write(b"first")
    await unary(request, context)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[ServerSpans()])
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Written": grpc.unary_stream_rpc_method_handler(written),
    }
    for service in (SERVICE, "grpc.health.v1.Health", "baton.worker.v1.WorkerService"):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def call(
    channel: grpc.aio.Channel, method: str, request: bytes, timeout_s: float | None = None
) -> None:
    """Makes a call to its end, in the trace of `CALLER`."""
    path, metadata = f"/{SERVICE}/{method}", (("traceparent", CALLER),)
    if method == "Unary":
        await channel.unary_unary(path)(request, timeout=timeout_s, metadata=metadata)
        return
    async for message in channel.unary_stream(path)(request, timeout=timeout_s, metadata=metadata):
        heard.add(message)


METHODS = pytest.mark.parametrize("method", ["Unary", "Written"])


@METHODS
async def test_a_call_that_succeeds(method: str, channel: grpc.aio.Channel, memory: Memory) -> None:
    await call(channel, method, SECRET)
    server, inside = await memory.one(SpanKind.SERVER), await memory.one(SpanKind.INTERNAL)
    assert server.name == f"{SERVICE}/{method}"
    assert server.parent is not None
    assert inside.parent is not None
    assert f"{server.parent.trace_id:032x}" == CALLER.split("-")[1]
    assert f"{server.parent.span_id:016x}" == CALLER.split("-")[2]
    assert inside.parent.span_id == server.context.span_id
    assert inside.context.trace_id == server.context.trace_id
    assert server.attributes == {
        Attr.RPC_SYSTEM_NAME: "grpc",
        Attr.RPC_METHOD: f"{SERVICE}/{method}",
        Attr.RPC_RESPONSE_STATUS_CODE: "OK",
    }
    assert server.status.status_code is StatusCode.UNSET
    assert not undeclared(server.attributes)
    assert SECRET.decode() not in server.to_json()


@METHODS
@pytest.mark.parametrize(
    ("request_", "code", "servers_fault"),
    [
        (b"abort", "RESOURCE_EXHAUSTED", False),
        (b"internal", "INTERNAL", True),
        (b"raise", "UNKNOWN", True),
        (b"set", "NOT_FOUND", False),
    ],
)
async def test_a_call_that_fails(
    method: str,
    request_: bytes,
    code: str,
    servers_fault: bool,
    channel: grpc.aio.Channel,
    memory: Memory,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await call(channel, method, request_)
    server = await memory.one(SpanKind.SERVER)
    assert _code(server) == code
    assert (server.status.status_code is StatusCode.ERROR) == servers_fault
    assert SECRET.decode() not in server.to_json()


@METHODS
async def test_a_call_that_its_caller_cancels(
    method: str, channel: grpc.aio.Channel, memory: Memory
) -> None:
    running = asyncio.create_task(call(channel, method, b"forever", timeout_s=60))
    # A stream's caller that is cancelled as its request has just left, before it begins to read,
    # ends without gRPC's cancelling the call.
    await until(lambda: waiting and (method == "Unary" or heard))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert _code(await memory.one(SpanKind.SERVER)) == "CANCELLED"


@METHODS
async def test_a_call_whose_deadline_is_met(
    method: str, channel: grpc.aio.Channel, memory: Memory
) -> None:
    for deadline_s in DEADLINES_S:
        memory.forget()
        with pytest.raises(grpc.aio.AioRpcError):
            await call(channel, method, b"forever", timeout_s=deadline_s)
        if waiting:
            break
    server = await memory.one(SpanKind.SERVER)
    assert _code(server) == "DEADLINE_EXCEEDED"
    assert server.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("service", ["grpc.health.v1.Health", "baton.worker.v1.WorkerService"])
async def test_probes_and_the_workers_stream_have_no_span(
    service: str, channel: grpc.aio.Channel, memory: Memory
) -> None:
    await channel.unary_unary(f"/{service}/Unary")(b"x")
    assert memory.all(SpanKind.SERVER) == []


def _code(span: ReadableSpan) -> object:
    assert span.attributes is not None
    return span.attributes[Attr.RPC_RESPONSE_STATUS_CODE]
