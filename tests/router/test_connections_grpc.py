"""Idle, slow and unread connections of gRPC end, at both of its doors; a client here speaks HTTP/2
by hand."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from frontdoor_kit import (
    ScriptedDispatcher,
    access_lines,
    ids_input,
    plays,
    served_model,
    write_tokenizer,
)
from waiting import until

from baton import grpc_options
from baton.grpc_options import channel_options, public_server_options
from baton.inference.v1 import inference_pb2 as api
from baton.inference.v1 import inference_pb2_grpc as api_grpc
from router.doors.frontdoor import InferenceService
from router.doors.http2.server import FastDoor
from router.requests.bounds import BodyShape
from router.requests.tokenization import Tokenizers
from router.requests.validation import Limits
from telemetry.metrics.router import RouterLoad, RouterMetrics
from telemetry.names import Metric

LONG_S = 20.0
"""Nothing here takes so long, but where a connection stays."""
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
END_STREAM, END_HEADERS, ACK = 1, 4, 1
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WINDOW = struct.pack(">HI", 4, 0)
"""Of every stream: nothing may be sent."""


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second or so in place of longer bounds."""
    monkeypatch.setattr(grpc_options, "PUBLIC_HANDSHAKE_MS", 1000)
    monkeypatch.setattr("router.doors.http.connections.HEADERS_S", 1.0)
    monkeypatch.setattr(grpc_options, "PUBLIC_IDLE_MS", 1000)
    monkeypatch.setattr("router.requests.deadlines.UNREAD_GRACE_S", 0.5)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def header(name: str, value: str) -> bytes:
    """One that no table holds; of under 127 bytes."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class Client:
    """A bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, address: str) -> Client:
        host, _, port = address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def greet(self) -> None:
        self.writer.write(HELLO + frame(SETTINGS, 0, 0, WINDOW))

    def call(self, method: str, message: bytes) -> None:
        """A call whose answer has no room to come."""
        pairs = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/baton.inference.v1.InferenceService/{method}",
            ":authority": "x",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        block = b"".join(header(*pair) for pair in pairs.items())
        body = b"\0" + struct.pack(">I", len(message)) + message
        self.writer.write(frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, body))

    async def end(self) -> None:
        """Answers pings and settings until the server closes the connection."""
        try:
            async with asyncio.timeout(LONG_S):
                while True:
                    top = await self.reader.readexactly(9)
                    payload = await self.reader.readexactly(int.from_bytes(top[:3], "big"))
                    if top[3] in (SETTINGS, PING) and not top[4] & ACK:
                        said = payload if top[3] == PING else b""
                        self.writer.write(frame(top[3], ACK, 0, said))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return


@asynccontextmanager
async def served(
    folder: Path,
    events: RouterMetrics,
    is_fast: bool,
    output: Sequence[int] = (70,),
    longest_s: float = 600.0,
) -> AsyncIterator[str]:
    """The address of a door whose server may have three connections."""
    write_tokenizer(folder)
    dispatcher = ScriptedDispatcher([served_model(folder)], plays(list(output)))
    tokenizers = Tokenizers()
    await tokenizers.get(str(folder))  # Reading it takes seconds on a busy machine.
    limits = Limits(max_request_duration_s=longest_s)
    service = InferenceService(dispatcher, tokenizers, limits, events)
    server: Any
    if is_fast:
        server = FastDoor("127.0.0.1:0", BodyShape(dispatcher.models), 3, longest_s + 1)
        service.add_to_server(server)
        await server.start()
        yield server.address
    else:
        server = grpc.aio.server(options=public_server_options(3, longest_s + 1))
        service.add_to_server(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
    await server.stop(0)
    tokenizers.close()


@pytest.fixture
def counted() -> RouterMetrics:
    return RouterMetrics(RouterLoad)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["grpc", "fast"])
def is_fast(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("greets", [False, True])
async def test_a_connection_without_a_call_is_closed(
    tmp_path: Path, counted: RouterMetrics, is_fast: bool, greets: bool
) -> None:
    """It said nothing; it answers pings."""
    async with served(tmp_path, counted, is_fast) as address:
        client = await Client.of(address)
        if greets:
            client.greet()
        await client.end()


async def test_there_are_so_many_connections_and_no_more(
    tmp_path: Path, counted: RouterMetrics, is_fast: bool
) -> None:
    async with served(tmp_path, counted, is_fast) as address:
        clients = [await Client.of(address) for _ in range(4)]
        for client in clients:
            client.greet()
        ends = [asyncio.create_task(client.end()) for client in clients]
        done, _ = await asyncio.wait(ends, timeout=LONG_S, return_when=asyncio.FIRST_COMPLETED)
        assert done <= {ends[0 if is_fast else 3]}  # The fast door lets go who waits longest.
        await asyncio.wait(ends, timeout=LONG_S)
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            stub = api_grpc.InferenceServiceStub(channel)
            assert await stub.ListModels(api.ListModelsRequest(), timeout=LONG_S)


async def test_a_client_that_comes_back_after_a_while_notices_nothing(
    tmp_path: Path, counted: RouterMetrics, is_fast: bool
) -> None:
    async with (
        served(tmp_path, counted, is_fast) as address,
        grpc.aio.insecure_channel(address, options=channel_options()) as channel,
    ):
        stub = api_grpc.InferenceServiceStub(channel)
        for _ in range(2):
            assert await stub.ListModels(api.ListModelsRequest(), timeout=LONG_S)
            await asyncio.sleep(2.0)


async def test_a_stream_that_nobody_reads_ends_at_its_deadline(
    tmp_path: Path,
    counted: RouterMetrics,
    is_fast: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(grpc_options, "PUBLIC_AGE_MS", 2000)
    caplog.set_level("INFO")
    async with served(tmp_path, counted, is_fast, [70] * 20, longest_s=1.0) as address:
        client = await Client.of(address)
        client.greet()
        request = api.StreamGenerateRequest(input=ids_input())
        client.call("StreamGenerate", request.SerializeToString())
        ended = asyncio.create_task(client.end())
        name = Metric.UNREAD_STREAMS + "_total"
        await until(lambda: counted.registry.get_sample_value(name) == 1)
        (line,) = access_lines(caplog)
        assert (line["status"], line["reason"]) == ("DEADLINE_EXCEEDED",) * 2
        await ended
