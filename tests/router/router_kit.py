"""A whole router, as its process composes it, with scripted workers that announced themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from scripted_worker import BOTH, PATIENT, ScriptedWorker, until
from settings_kit import settings_of

from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from router.server import RouterServer
from router.settings import RouterSettings

ANY = "127.0.0.1:0"


@asynccontextmanager
async def a_router(**settings: Any) -> AsyncIterator[RouterServer]:
    """A router without workers."""
    ports = dict.fromkeys(("listen", "internal_listen", "http_listen", "admin"), ANY)
    server = RouterServer(
        settings_of(RouterSettings, **{"drain_grace_s": 0, **PATIENT, **ports, **settings})
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def served(
    role: int = BOTH, **settings: Any
) -> AsyncIterator[tuple[RouterServer, ScriptedWorker]]:
    """A router, and a worker that announced itself to it."""
    async with a_router(**settings) as server:
        worker = ScriptedWorker("b0", role)
        await worker.start()
        try:
            await announce(server, worker.identity)
            await until(server.dispatcher.attached_models)
            yield server, worker
        finally:
            await server.stop()
            await worker.stop()


async def announce(
    server: RouterServer, identity: worker_pb2.WorkerIdentity, *, loading: bool = False
) -> None:
    """Over the router's internal port."""
    async with grpc.aio.insecure_channel(server.internal_address) as channel:
        registry = worker_pb2_grpc.RegistryServiceStub(channel)
        await registry.Announce(worker_pb2.AnnounceRequest(worker=identity, loading=loading))
