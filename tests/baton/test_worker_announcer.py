"""Announcing: start order is free, and a router that comes back is found."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from baton import worker_announcer
from baton.grpc_options import server_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from baton.worker_announcer import announce_forever, announced_as_loading

WORKER = worker_pb2.WorkerIdentity(worker_id="w", epoch=7, address="127.0.0.1:1")


class RegistryRecorder(worker_pb2_grpc.RegistryServiceServicer):
    def __init__(self) -> None:
        self.heard: asyncio.Queue[worker_pb2.WorkerIdentity] = asyncio.Queue()
        self.loading = 0
        self.attached = False

    async def Announce(
        self, request: worker_pb2.AnnounceRequest, context: Any
    ) -> worker_pb2.AnnounceResponse:
        self.heard.put_nowait(request.worker)
        self.loading += request.loading
        return worker_pb2.AnnounceResponse(attached=self.attached)


async def _serve(recorder: RegistryRecorder, address: str) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=server_options())
    worker_pb2_grpc.add_RegistryServiceServicer_to_server(recorder, server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, f"127.0.0.1:{port}"


async def test_goes_on_when_the_router_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_announcer, "UNATTACHED_INTERVAL_S", 0.02)
    monkeypatch.setattr(worker_announcer, "ATTACHED_INTERVAL_S", 0.05)
    recorder = RegistryRecorder()
    server, address = await _serve(recorder, "127.0.0.1:0")
    announcing = asyncio.create_task(announce_forever(address, WORKER))
    async with asyncio.timeout(20):
        assert await recorder.heard.get() == WORKER
        recorder.attached = True
        await recorder.heard.get()
        await server.stop(None)
        while not recorder.heard.empty():
            recorder.heard.get_nowait()
        await asyncio.sleep(0.1)
        server, _ = await _serve(recorder, address)
        assert await recorder.heard.get() == WORKER
    announcing.cancel()
    await server.stop(None)


async def test_a_port_of_something_else_is_told_from_none(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most often it is the router's own, for clients."""
    monkeypatch.setattr(worker_announcer, "TIMEOUT_S", 60.0)  # a busy machine is no deadline met
    server = grpc.aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    announcing = asyncio.create_task(announce_forever(f"127.0.0.1:{port}", WORKER))
    async with asyncio.timeout(60):
        while not caplog.records:
            await asyncio.sleep(0.01)
    announcing.cancel()
    await server.stop(None)
    (record,) = caplog.records
    assert vars(record)["cause"] == "not a router's internal port"


async def test_says_that_it_loads_and_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a thread of its own, past a router that is not there."""
    monkeypatch.setattr(worker_announcer, "UNATTACHED_INTERVAL_S", 0.1)
    recorder = RegistryRecorder()
    server, address = await _serve(recorder, "127.0.0.1:0")
    loading = announced_as_loading(["127.0.0.1:1", address], WORKER)
    async with asyncio.timeout(20):
        await asyncio.to_thread(loading.__enter__)
        for _ in range(3):
            assert await recorder.heard.get() == WORKER
        await asyncio.to_thread(loading.__exit__, None, None, None)
    assert recorder.loading >= 3
    await asyncio.sleep(0.3)  # What it gave up waiting for may still arrive.
    heard = recorder.loading
    await asyncio.sleep(0.3)
    assert recorder.loading == heard
    await server.stop(None)
