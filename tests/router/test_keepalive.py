"""Peers that stand still, streams that are silent: real processes at both ends of a connection."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_kit import a_router, announce, served
from scripted_worker import BOTH, BUSY_S, WAIT_S, until
from test_router_link import worker_process

from baton.client.clients import AsyncClient
from baton.errors import BatonError
from baton.grpc_options import DETECTION_MS, channel_options

NOTICED_S = 3.0
"""Keepalive alone takes `DETECTION_MS`; gRPC's own defaults would take a minute."""
START_S = 60.0
CLIENT = """
import sys
from baton.client.clients import Client

with Client(sys.argv[1]) as client:
    with client.stream(token_ids=[1, 2, 3], max_tokens=100, omit_text=True) as stream:
        for delta in stream:
            print("delta", flush=True)
"""


def test_detection_leaves_room_within_what_is_promised() -> None:
    assert DETECTION_MS / 1e3 <= NOTICED_S - 0.5


@asynccontextmanager
async def a_client_process(address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, address, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def test_a_client_that_froze_is_noticed_and_its_work_ends() -> None:
    async with served() as (server, worker), a_client_process(server.address) as client:
        await until(lambda: worker.count("submit"), START_S)
        attempt = (await worker.heard("submit")).attempt_id
        worker.first_token(attempt, 10)
        assert client.stdout is not None
        assert await client.stdout.readline() == b"delta\n"
        frozen_s = time.monotonic()
        client.send_signal(signal.SIGSTOP)
        assert (await worker.heard("cancel")).attempt_id == attempt
        assert time.monotonic() - frozen_s < NOTICED_S + BUSY_S
        await until(lambda: not server.dispatcher.active_jobs)


async def test_a_worker_that_froze_is_noticed_and_the_client_told() -> None:
    """In the midst of a step that it has announced to take a minute: pings tell the two apart."""
    async with (
        a_router(max_retries=0) as server,
        worker_process(BOTH) as (process, identity),
        AsyncClient(server.address, retries=False) as client,
    ):
        await announce(server, identity)
        await until(server.dispatcher.models)
        asked = asyncio.create_task(client.generate(token_ids=[1, 2, 3], max_tokens=2))
        await until(lambda: server.dispatcher.active_attempts)
        frozen_s = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(BatonError) as told:
            await asyncio.wait_for(asked, 2 * WAIT_S)
        assert time.monotonic() - frozen_s < NOTICED_S + BUSY_S
        assert (told.value.code, told.value.reason) == (
            grpc.StatusCode.UNAVAILABLE,
            "WORKER_LOST",
        )


class _Silent(health_pb2_grpc.HealthServicer):
    """A server that allows what gRPC does by itself, and says nothing."""

    async def Check(self, request, context):
        await asyncio.sleep(10 * WAIT_S)


@asynccontextmanager
async def a_strict_server() -> AsyncIterator[str]:
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(_Silent(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def closed_for_its_pings(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="Too many pings"):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


async def test_a_long_silence_is_no_abuse() -> None:
    """A prompt that takes long to compute: pings, and nothing else. The silence lasts twice as long
    as a server that counts them lets the same channel live."""
    async with (
        served() as (server, worker),
        a_strict_server() as strict,
        AsyncClient(server.address) as client,
    ):
        stream = client.stream(token_ids=[1, 2, 3], max_tokens=2, omit_text=True)
        first = asyncio.ensure_future(anext(stream))
        attempt = (await worker.heard("submit")).attempt_id
        began_s = time.monotonic()
        await asyncio.wait_for(closed_for_its_pings(strict), 2 * WAIT_S)
        await asyncio.sleep(time.monotonic() - began_s)
        assert not first.done()
        assert not worker.count("submit"), "the connection broke, and the client asked again"
        worker.first_token(attempt, 10)
        assert (await first).token_ids == (10,)
        worker.tokens(attempt, 1, 11)
        worker.finished(attempt, 2)
        assert [delta.token_ids async for delta in stream] == [(11,)]
