"""A worker announces itself to routers for as long as it lives. While it loads, it says so.

Life of a router's address:

1. Listed (`worker.router_addresses`). The worker announces itself there every second until the
   router holds a stream, and every few seconds after that.
2. Unreached. The worker goes on while the address is listed: the router may come back, and
   processes start in any order.
3. Let go, once it is neither listed nor reached.

A router with two addresses hears every announcement twice and attaches once: it knows the worker by
name and epoch, and it opens the stream.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import grpc

from baton.grpc_options import direct_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from serving.net.internal_net import ROUTER_NAME, ClearNet, InternalNet, is_untrusted
from serving.net.refusals import Cause
from worker.router_addresses import RouterAddresses
from worker.settings import Role

ROLES: Final = {
    Role.PREFILL: worker_pb2.WORKER_ROLE_PREFILL,
    Role.DECODE: worker_pb2.WORKER_ROLE_DECODE,
    Role.BOTH: worker_pb2.WORKER_ROLE_BOTH,
}
logger = logging.getLogger(__name__)

UNATTACHED_INTERVAL_S: Final = 1.0
ATTACHED_INTERVAL_S: Final = 3.0
TIMEOUT_S: Final = 2.0
"""Seconds. A router that has come hears of a worker within the first; once it holds a stream, an
announcement repeats what it knows. None is tuned."""
_TOLD_WHY: Final = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED)
CLEAR: Final = ClearNet()


@contextmanager
def announced_as_loading(
    routers: RouterAddresses, worker: worker_pb2.WorkerIdentity, net: InternalNet = CLEAR
) -> Iterator[None]:
    """Reports to routers that a worker's model is being loaded, on a thread of its own."""
    over = threading.Event()
    thread = threading.Thread(
        target=_say_loading, args=(routers, worker, net, over), name="loading", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _say_loading(
    routers: RouterAddresses,
    worker: worker_pb2.WorkerIdentity,
    net: InternalNet,
    over: threading.Event,
) -> None:
    request = worker_pb2.AnnounceRequest(worker=worker, loading=True)
    channels: dict[str, grpc.Channel] = {}
    with ExitStack() as stack:
        while True:
            for address in routers.listed():
                if over.is_set():
                    return
                if address not in channels:
                    channel = net.open(address, ROUTER_NAME, direct_options())
                    channels[address] = stack.enter_context(channel)
                with suppress(grpc.RpcError):  # The router is not there, or not yet.
                    registry = worker_pb2_grpc.RegistryServiceStub(channels[address])
                    registry.Announce(request, timeout=UNATTACHED_INTERVAL_S)
            if over.wait(UNATTACHED_INTERVAL_S):
                return


async def announce_forever(
    routers: RouterAddresses, worker: worker_pb2.WorkerIdentity, net: InternalNet = CLEAR
) -> None:
    """Announces a worker to all routers until cancelled. Routers that come later hear it, too."""
    announcing: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            announcing = {address: task for address, task in announcing.items() if not task.done()}
            for address in routers.listed():
                if address not in announcing:
                    announcing[address] = asyncio.create_task(
                        _announce(address, worker, routers, net)
                    )
            await asyncio.sleep(UNATTACHED_INTERVAL_S)
    finally:
        for task in announcing.values():
            task.cancel()


async def _announce(
    address: str, worker: worker_pb2.WorkerIdentity, routers: RouterAddresses, net: InternalNet
) -> None:
    """Announces a worker to the router at one address until the address is let go."""
    was_attached: bool | None = None
    while True:
        version = net.version
        async with net.open_aio(address, ROUTER_NAME, direct_options()) as channel:
            registry = worker_pb2_grpc.RegistryServiceStub(channel)
            while net.version == version:
                request = worker_pb2.AnnounceRequest(worker=worker)  # Its role may change.
                try:
                    attached = (await registry.Announce(request, timeout=TIMEOUT_S)).attached
                except grpc.aio.AioRpcError as error:
                    if _is_lost(error) and address not in routers.listed():
                        logger.info("router gone, and so is its address", extra={"router": address})
                        return
                    attached = False
                    if was_attached is not False:
                        _warn_not_reached(address, error, net)
                was_attached = attached
                await asyncio.sleep(ATTACHED_INTERVAL_S if attached else UNATTACHED_INTERVAL_S)


def _is_lost(error: grpc.aio.AioRpcError) -> bool:
    """Whether there is no connection. A router that answers too late is not lost."""
    return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


def _warn_not_reached(address: str, error: grpc.aio.AioRpcError, net: InternalNet) -> None:
    details = {"router": address, "status": error.code().name}
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        details["cause"] = "not a router's internal port"
    if error.code() in _TOLD_WHY:
        details["cause"] = error.details() or ""
    if is_untrusted(error.details()):
        details["cause"] = "it shows no valid certificate of a router"
        net.refusals.refuse(Cause.CERTIFICATE, details["cause"], router=address)
    logger.warning("router not reached, trying on", extra=details)
