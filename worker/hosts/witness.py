"""Bears witness at routers: which processes of a worker have ended on this host.

Who keeps ranks says so when they have ended. And whatever runs under a worker's name looks for
processes of earlier starts of it: a supervisor starts a lost worker again on its host, and this
host's kernel knows what became of the one before (`router.deaths.witness`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from baton.grpc_options import direct_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from kv_transfer.transports.processes import has_ended, this_host
from serving.net.internal_net import ROUTER_NAME, InternalNet
from worker.router_addresses import RouterAddresses

logger = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""Time between two questions to a router. Pages wait for the answer in quarantine, and there are
enough others."""
TIMEOUT_S: Final = 2.0
"""For a router's answer, seconds: as long as for that to an announcement."""
LAST_WORDS_S: Final = 30.0
"""Who ends tries for so long to reach the routers: a network may be down for a moment. Then a
supervisor starts it again, and the next start says it. Not tuned."""


@contextmanager
def looking(worker_id: str, routers: RouterAddresses, net: InternalNet) -> Iterator[None]:
    """Looks again and again for processes of earlier starts, on a thread of its own."""
    over, witness = threading.Event(), Witness(worker_id, routers, net)

    def look() -> None:
        while not over.wait(LOOK_S):
            try:
                witness.look()
            except Exception as error:
                logger.warning("cannot bear witness now", extra={"cause": type(error).__name__})

    threading.Thread(target=look, name="baton-witness", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class Witness:
    """For one worker's name. It belongs to one thread.

    Args:
        worker_id: that name.
        routers: where the routers are.
        net: how they are reached.
    """

    def __init__(self, worker_id: str, routers: RouterAddresses, net: InternalNet) -> None:
        self._worker_id = worker_id
        self._routers = routers
        self._net = net

    def look(self) -> None:
        """Asks each router for what it wants to know, and says what this host's kernel says."""
        for address in self._routers.listed():
            if wanted := self._tell(address, ()):
                self._tell(address, [process for process in wanted if has_ended(process)])

    def say(self, ended: Collection[str], within_s: float = LAST_WORDS_S) -> None:
        """Says that these have ended, until every router has heard it or the time is over."""
        ends_s, left = time.monotonic() + within_s, set(self._routers.listed())
        while True:
            left = {address for address in left if self._tell(address, ended) is None}
            if not left or time.monotonic() > ends_s:
                break
            time.sleep(LOOK_S / 4)
        if left:
            logger.warning("routers did not hear which ranks have ended", extra={"routers": left})

    def _tell(self, address: str, ended: Collection[str]) -> list[str] | None:
        """What the router wants to know; None: it was not reached, or does not listen to this."""
        request = worker_pb2.WitnessRequest(
            worker_id=self._worker_id, host=this_host(), ended=list(ended)
        )
        try:
            with self._net.open(address, ROUTER_NAME, direct_options()) as channel:
                registry = worker_pb2_grpc.RegistryServiceStub(channel)
                return list(registry.Witness(request, timeout=TIMEOUT_S).wanted)
        except grpc.RpcError:
            return None
