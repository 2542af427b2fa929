"""Routers that are reached by names and by several addresses, and who attaches to whom then."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from router_kit import a_router
from scripted_worker import BOTH, ScriptedWorker, until
from stand_in_names import Names

from baton.worker.v1 import worker_pb2
from router.server import RouterServer
from worker import announcer as worker_announcer
from worker.router_addresses import RouterAddresses


class CountingWorker(ScriptedWorker):
    """Knows how often each router attached."""

    def __init__(self) -> None:
        super().__init__("b0", BOTH)
        self.attached: Counter[str] = Counter()

    async def Work(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        attach = await anext(aiter(request_iterator))
        self.attached[attach.attach.router_id] += 1

        async def from_the_start() -> AsyncIterator[worker_pb2.WorkRequest]:
            yield attach
            async for request in request_iterator:
                yield request

        async for response in super().Work(from_the_start(), context):
            yield response


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_announcer, "UNATTACHED_INTERVAL_S", 0.02)
    monkeypatch.setattr(worker_announcer, "ATTACHED_INTERVAL_S", 0.02)


@asynccontextmanager
async def announcing(*routers: str) -> AsyncIterator[CountingWorker]:
    worker = CountingWorker()
    await worker.start()
    with RouterAddresses(routers) as known:
        announcing = asyncio.create_task(worker_announcer.announce_forever(known, worker.identity))
        try:
            yield worker
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
            await worker.stop()


def port_of(router: RouterServer) -> str:
    return router.internal_address.rpartition(":")[2]


async def test_a_worker_is_attached_to_every_router_of_a_name(names: Names) -> None:
    async with a_router(name="router-0") as one:
        port = port_of(one)
        async with a_router(name="router-1", internal_listen=f"127.0.0.2:{port}") as other:
            names["routers.test"] = ["127.0.0.1", "127.0.0.2"]
            async with announcing(f"routers.test:{port}") as worker:
                for router in (one, other):
                    await until(lambda router=router: router.registry.members)
                assert worker.attached == {"router-0": 1, "router-1": 1}


async def test_a_router_with_two_addresses_attaches_once(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes by who the worker says it is, wherever that is said."""
    heard: Counter[str] = Counter()
    async with a_router(internal_listen="0.0.0.0:0", insecure=True) as router:
        announce = router.registry.announce

        def counted(identity: worker_pb2.WorkerIdentity, server_name: str = "") -> bool:
            heard[
                "attached" if (is_attached := announce(identity, server_name)) else "not yet"
            ] += 1
            return is_attached

        monkeypatch.setattr(router.registry, "announce", counted)
        names["router.test"] = ["127.0.0.1", "127.0.0.2"]
        async with announcing(
            f"router.test:{port_of(router)}", f"127.0.0.3:{port_of(router)}"
        ) as w:
            await until(lambda: heard["attached"] >= 30)
            assert list(w.attached.values()) == [1]
            assert len(router.registry.members) == 1
