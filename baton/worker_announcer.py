"""A worker tells routers that it exists, for as long as it lives; before that, that it loads.

Each router is told every second until it holds a stream, and every few seconds after that. One that
is not there, or went away, goes on being told: it may come back, and processes start in any order.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import grpc

from baton.grpc_options import channel_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc

logger = logging.getLogger(__name__)

UNATTACHED_INTERVAL_S: Final = 1.0
ATTACHED_INTERVAL_S: Final = 3.0
TIMEOUT_S: Final = 2.0


@contextmanager
def announced_as_loading(
    addresses: Sequence[str], worker: worker_pb2.WorkerIdentity
) -> Iterator[None]:
    """Tells routers, from a thread of its own, that a worker's model is being loaded."""
    over = threading.Event()
    thread = threading.Thread(
        target=_say_loading, args=(addresses, worker, over), name="loading", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _say_loading(
    addresses: Sequence[str], worker: worker_pb2.WorkerIdentity, over: threading.Event
) -> None:
    request = worker_pb2.AnnounceRequest(worker=worker, loading=True)
    with ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(address, options=channel_options()))
            for address in addresses
        ]
        while True:
            for channel in channels:
                with suppress(grpc.RpcError):  # It is not there, or not yet.
                    registry = worker_pb2_grpc.RegistryServiceStub(channel)
                    registry.Announce(request, timeout=UNATTACHED_INTERVAL_S)
            if over.wait(UNATTACHED_INTERVAL_S):
                return


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
                    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                        details["cause"] = "not a router's internal port"
                    logger.warning("router not reached, trying on", extra=details)
            was_attached = attached
            await asyncio.sleep(ATTACHED_INTERVAL_S if attached else UNATTACHED_INTERVAL_S)
