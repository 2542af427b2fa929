"""Announcing: start order is free, and routers that come back or come later are found."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from stand_in_names import Names
from waiting import WAIT_S, until

from baton.grpc_options import server_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from worker import announcer as worker_announcer
from worker import router_addresses
from worker.announcer import announce_forever, announced_as_loading
from worker.router_addresses import RouterAddresses

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


@pytest.fixture(autouse=True)
async def _none_is_left() -> AsyncIterator[None]:
    """Servers end with their test, however that ends: one that is left hangs those to come."""
    yield
    while _served:
        await _served.pop().stop(None)


_served: list[grpc.aio.Server] = []


async def _serve(recorder: RegistryRecorder, address: str) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=server_options())
    _served.append(server)
    worker_pb2_grpc.add_RegistryServiceServicer_to_server(recorder, server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, f"{address.rpartition(':')[0]}:{port}"


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, interval in (
        (worker_announcer, "UNATTACHED_INTERVAL_S"),
        (worker_announcer, "ATTACHED_INTERVAL_S"),
        (router_addresses, "UNKNOWN_INTERVAL_S"),
        (router_addresses, "LOOKUP_INTERVAL_S"),
    ):
        monkeypatch.setattr(module, interval, 0.02)
    monkeypatch.setattr(worker_announcer, "TIMEOUT_S", WAIT_S)  # no busy machine is a deadline met


@asynccontextmanager
async def _announcing(router: str) -> AsyncIterator[None]:
    with RouterAddresses([router]) as routers:
        announcing = asyncio.create_task(announce_forever(routers, WORKER))
        try:
            yield
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)


def _found(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a name stood for, lookup by lookup."""
    return [vars(record)["addresses"] for record in caplog.records if "addresses" in vars(record)]


def _v6_or_another() -> str:
    """A loopback address of this host, of the other family where it has that."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return "::1"
    except OSError:
        return "127.0.0.3"


async def _hears_again(*recorders: RegistryRecorder) -> None:
    """Each is told of the worker from now on."""
    for recorder in recorders:
        while not recorder.heard.empty():
            recorder.heard.get_nowait()
        async with asyncio.timeout(WAIT_S):
            assert await recorder.heard.get() == WORKER
            assert await recorder.heard.get() == WORKER


async def test_goes_on_when_the_router_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_announcer, "UNATTACHED_INTERVAL_S", 0.02)
    monkeypatch.setattr(worker_announcer, "ATTACHED_INTERVAL_S", 0.05)
    recorder = RegistryRecorder()
    server, address = await _serve(recorder, "127.0.0.1:0")
    announcing = asyncio.create_task(announce_forever(RouterAddresses([address]), WORKER))
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
    announcing = asyncio.create_task(
        announce_forever(RouterAddresses([f"127.0.0.1:{port}"]), WORKER)
    )
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
    loading = announced_as_loading(RouterAddresses(["127.0.0.1:1", address]), WORKER)
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


@pytest.mark.usefixtures("_often")
async def test_every_router_of_a_name_is_told_and_so_are_those_to_come(names: Names) -> None:
    one, other, third = (RegistryRecorder() for _ in range(3))
    _, address = await _serve(one, "127.0.0.1:0")
    port = address.rpartition(":")[2]
    await _serve(other, f"127.0.0.2:{port}")
    names["routers.test"] = ["127.0.0.1", "127.0.0.2"]
    async with _announcing(f"routers.test:{port}"):
        await _hears_again(one, other)
        host = _v6_or_another()
        names["routers.test"] = ["127.0.0.1", "127.0.0.2", host]
        await _serve(third, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        await _hears_again(one, other, third)


@pytest.mark.usefixtures("_often")
async def test_a_router_is_let_go_when_its_name_and_its_connection_are_gone(
    names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    def gone() -> list[str]:
        return [vars(r)["router"] for r in caplog.records if r.message.startswith("router gone")]

    caplog.set_level(logging.INFO, "worker")
    stays, leaves = RegistryRecorder(), RegistryRecorder()
    _, address = await _serve(stays, "127.0.0.1:0")
    port = address.rpartition(":")[2]
    leaving, left = await _serve(leaves, f"127.0.0.2:{port}")
    names["routers.test"] = ["127.0.0.1", "127.0.0.2"]
    async with _announcing(f"routers.test:{port}"):
        await _hears_again(stays, leaves)
        names["routers.test"] = ["127.0.0.1"]
        await until(lambda: _found(caplog)[-1] == address)
        await _hears_again(stays, leaves)  # it is still there: it drains, say
        await leaving.stop(None)
        await until(gone)
        assert gone() == [left]
        await _serve(leaves, left)  # somebody's, who is no router of this worker's
        while not leaves.heard.empty():
            leaves.heard.get_nowait()
        for _ in range(5):
            await _hears_again(stays)
        assert leaves.heard.empty()
        names["routers.test"] = ["127.0.0.1", "127.0.0.2"]
        await _hears_again(stays, leaves)


@pytest.mark.usefixtures("_often")
async def test_a_router_that_is_late_is_not_gone(
    names: Names, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer in time says nothing of the connection."""

    class Late(RegistryRecorder):
        async def Announce(
            self, request: worker_pb2.AnnounceRequest, context: Any
        ) -> worker_pb2.AnnounceResponse:
            answer = await super().Announce(request, context)
            await asyncio.sleep(2 * WAIT_S)
            return answer

    monkeypatch.setattr(worker_announcer, "TIMEOUT_S", 0.2)
    caplog.set_level(logging.INFO, "worker")
    late = Late()
    _, address = await _serve(late, "127.0.0.1:0")
    names["routers.test"] = ["127.0.0.1"]
    async with _announcing(f"routers.test:{address.rpartition(':')[2]}"):
        await _hears_again(late)
        names["routers.test"] = ["127.0.0.2"]
        await until(lambda: _found(caplog)[-1].startswith("127.0.0.2"))
        await _hears_again(late)
    assert not any(record.message.startswith("router gone") for record in caplog.records)


@pytest.mark.usefixtures("_often")
async def test_every_router_of_a_name_hears_that_the_worker_loads(names: Names) -> None:
    one, other = RegistryRecorder(), RegistryRecorder()
    _, address = await _serve(one, "127.0.0.1:0")
    port = address.rpartition(":")[2]
    await _serve(other, f"127.0.0.2:{port}")
    names["routers.test"] = ["127.0.0.1", "127.0.0.2"]
    with RouterAddresses([f"routers.test:{port}"]) as routers:
        loading = announced_as_loading(routers, WORKER)
        await asyncio.to_thread(loading.__enter__)
        await _hears_again(one, other)
        await asyncio.to_thread(loading.__exit__, None, None, None)
    assert one.loading
    assert other.loading
