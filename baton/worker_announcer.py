"""A worker tells routers that it exists, for as long as it lives.

Each router is told every second until it holds a stream, and every few seconds after that. A router
that is not there, or went away, is told on: it may come back, and start order is free.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc

from baton.grpc_options import channel_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

UNATTACHED_INTERVAL_S: Final = 1.0
ATTACHED_INTERVAL_S: Final = 3.0
TIMEOUT_S: Final = 2.0


async def announce_forever(address: str, worker: worker_pb2.WorkerIdentity) -> None:
    """Announces a worker to the router at `address` until cancelled."""
    was_attached: bool | None = None
    request = worker_pb2.AnnounceRequest(worker=worker)
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        registry = worker_pb2_grpc.RegistryServiceStub(channel)
        while True:
            try:
                attached = (await registry.Announce(request, timeout=TIMEOUT_S)).attached
            except grpc.aio.AioRpcError as error:
                attached = False
                if was_attached is not False:
                    details = {"router": address, "status": error.code().name}
                    logger.warning("router not reached, trying on", extra=details)
            was_attached = attached
            await asyncio.sleep(ATTACHED_INTERVAL_S if attached else UNATTACHED_INTERVAL_S)
