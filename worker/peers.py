"""Workers that this one may exchange KV pages with.

Life of a peer:

1. A router introduces it. Fingerprints are compared before anything else. A peer whose fingerprint
   differs is REFUSED and never opened.
2. OPENING: the transfer thread wires up to it. Transfers may be begun meanwhile.
3. OPEN, or FAILED. A FAILED peer is tried again, with back-off, while a router knows it. An OPEN
   peer that the self-test found slow is used only if there is no other.
4. It leaves when the last router that knows it says so, when a router says that it is proven dead,
   or when no router has known it for `ALONE_S`.

The end of a router's stream says nothing about its peers. They stay for the router that comes back,
which introduces those that are still there.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2
from kv_transfer.events import PeerFailed, PeerOpened, TransferEvent
from kv_transfer.types import Endpoint
from telemetry.metrics.worker import PeerPath
from worker_base.messages import endpoint_of

if TYPE_CHECKING:
    from kv_transfer.thread import TransferThread

logger = logging.getLogger(__name__)

FIRST_RETRY_S: Final = 1.0
LAST_RETRY_S: Final = 30.0
ALONE_S: Final = 60.0
"""A router that starts again knows its workers long before that. Meeting a peer anew is cheap."""


def why_slow(transport: str) -> str:
    """The reason why a path is slow, by its transport, as a short stable word."""
    match transport:
        case "nixl/tcp":
            return "slow_tcp_only"
        case "nixl/net":
            return "slow_network"
        case _:
            return "slow"


class PathState(enum.IntEnum):
    """State of a peer; failure is the smallest."""

    REFUSED = 0
    FAILED = 1
    OPENING = 2
    OPEN = 3


@dataclass(slots=True, eq=False)
class _KnownPeer:
    endpoint: Endpoint
    state: PathState
    known_to: set[object] = field(default_factory=set)
    """Streams of the routers that introduced it."""
    alone_s: float = math.inf
    """The time when the last of those ended."""
    path: str = ""
    gigabytes_per_s: float = 0.0
    latency_us: float = 0.0
    cause: str = ""
    """The reason to avoid it; empty if there is none."""
    retry_s: float = FIRST_RETRY_S
    retry_at_s: float = 0.0


class PeerPaths:
    """Peers by agent name. Belongs to the event loop."""

    def __init__(
        self,
        own: worker_pb2.WorkerIdentity,
        transfer: TransferThread,
        clock: Callable[[], float] = time.monotonic,
        slow_gigabytes_per_s: float = 0.0,
    ) -> None:
        """Begins without peers.

        Args:
            own: this worker.
            transfer: wires up to peers.
            clock: for back-off.
            slow_gigabytes_per_s: a path that was measured slower than this should be avoided.
        """
        self._own = own
        self._transfer = transfer
        self._clock = clock
        self._slow_gigabytes_per_s = slow_gigabytes_per_s
        self._peers: dict[str, _KnownPeer] = {}
        self.held_against: Callable[[], Mapping[str, str]] = dict
        """Set by the owner: reasons to avoid peers whose path is healthy, by agent name."""

    def is_usable(self, agent_name: str) -> bool:
        """Whether a transfer with that agent can be begun."""
        peer = self._peers.get(agent_name)
        return peer is not None and peer.state >= PathState.OPENING

    def path_to(self, agent_name: str) -> str:
        """The transport really in use towards that agent; "" if it is not known."""
        peer = self._peers.get(agent_name)
        return peer.path if peer is not None else ""

    def drafts_cause(self, agent_name: str) -> str:
        """Why what this worker's draft head keeps does not move to or from that agent, as a short
        stable word; empty: it does."""
        own, peer = self._own.endpoint.drafts.digest, self._peers.get(agent_name)
        groups = peer.endpoint.groups if peer is not None else ()
        theirs = groups[-1].digest if groups else ""
        return "" if own and own == theirs else "peer_differs" if theirs else "peer_without"

    def shares_drafts(self, agent_name: str) -> bool:
        """Whether that agent has the draft head of this worker."""
        return not self.drafts_cause(agent_name)

    def bytes_per_s(self, agent_name: str) -> float:
        """The path's bandwidth as it was measured when the two met; 0 while unknown."""
        peer = self._peers.get(agent_name)
        return 1e9 * peer.gigabytes_per_s if peer is not None else 0.0

    def health(self) -> list[worker_pb2.PeerHealth]:
        """The health of the path to each peer."""
        held_against = self.held_against()
        return [
            worker_pb2.PeerHealth(
                agent_name=name,
                transport=peer.path,
                gigabytes_per_s=peer.gigabytes_per_s,
                latency_us=peer.latency_us,
                cause=peer.cause or held_against.get(name, ""),
            )
            for name, peer in self._peers.items()
        ]

    def paths(self) -> list[PeerPath]:
        """Paths for metrics, by the workers' names, which outlive a restart."""
        return [
            PeerPath(
                health.agent_name.rpartition("-")[0] or health.agent_name,
                health.transport,
                health.gigabytes_per_s,
                health.latency_us,
                health.cause,
            )
            for health in self.health()
        ]

    def meet(self, worker: worker_pb2.WorkerIdentity, stream: object) -> None:
        """Takes a worker that a router introduces."""
        name = worker.endpoint.agent_name
        if not name or name == self._own.endpoint.agent_name:
            return
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _KnownPeer(endpoint_of(worker.endpoint), PathState.FAILED)
            self._open(peer, worker)
        peer.known_to.add(stream)
        peer.alone_s = math.inf

    def part(self, agent_name: str, proven_dead: bool, stream: object) -> None:
        """Takes a router's word that a worker left."""
        peer = self._peers.get(agent_name)
        if peer is not None:
            peer.known_to.discard(stream)
            if peer.known_to and not proven_dead:
                return
            del self._peers[agent_name]
        if proven_dead or (peer is not None and peer.state is not PathState.REFUSED):
            self._transfer.part(agent_name, proven_dead)

    def end_stream(self, stream: object) -> None:
        """Notes that a router is gone. Its peers stay."""
        for peer in self._peers.values():
            peer.known_to.discard(stream)
            if not peer.known_to:
                peer.alone_s = min(peer.alone_s, self._clock())

    def tick(self) -> None:
        """Tries failed peers again when their time has come, and lets go of those left alone."""
        now_s = self._clock()
        for name, peer in list(self._peers.items()):
            is_due = peer.state is PathState.FAILED and peer.retry_at_s <= now_s
            if is_due and peer.known_to:
                peer.state = PathState.OPENING
                self._transfer.meet(peer.endpoint)
            elif now_s - peer.alone_s > ALONE_S:
                self.part(name, False, None)

    def on_transfer(self, event: TransferEvent) -> None:
        """Takes an event of the transfer thread, and ignores those of other owners."""
        if not isinstance(event, PeerOpened | PeerFailed):
            return
        peer = self._peers.get(event.agent_name)
        if peer is None or peer.state is PathState.REFUSED:
            return
        match event:
            case PeerOpened():
                self._opened(peer, event)
            case PeerFailed():
                peer.state, peer.cause = PathState.FAILED, event.cause
                peer.retry_at_s = self._clock() + peer.retry_s
                peer.retry_s = min(2 * peer.retry_s, LAST_RETRY_S)
                details = {"peer": event.agent_name, "cause": event.cause}
                logger.warning("peer failed", extra=details)

    def _opened(self, peer: _KnownPeer, event: PeerOpened) -> None:
        was_open = peer.state is PathState.OPEN
        peer.state, peer.retry_s = PathState.OPEN, FIRST_RETRY_S
        peer.path, peer.latency_us = event.transport, event.latency_us
        peer.gigabytes_per_s = event.gigabytes_per_s
        is_slow = 0 < event.gigabytes_per_s < self._slow_gigabytes_per_s
        peer.cause = why_slow(event.transport) if is_slow else ""
        details: dict[str, str | float] = {
            "peer": event.agent_name,
            "transport": event.transport,
            "latency_us": event.latency_us,
        }
        if event.gigabytes_per_s > 0:  # it was measured; transfers do not wait for that
            details["gigabytes_per_s"] = event.gigabytes_per_s
        if peer.cause:
            wanted = {"cause": peer.cause, "wanted_gigabytes_per_s": self._slow_gigabytes_per_s}
            logger.warning("peer is open but slow: routers avoid the pair", extra=details | wanted)
        else:
            logger.info("peer measured" if was_open else "peer open", extra=details)

    def _open(self, peer: _KnownPeer, worker: worker_pb2.WorkerIdentity) -> None:
        own, other = self._own.model, worker.model
        if own.fingerprint != other.fingerprint:
            peer.state, peer.cause = PathState.REFUSED, "fingerprint"
            logger.error(
                "peer refused: its model, weights or KV layout differ",
                extra={
                    "peer": worker.worker_id,
                    "own_fingerprint": own.fingerprint,
                    "fingerprint": other.fingerprint,
                },
            )
            return
        peer.state = PathState.OPENING
        self._transfer.meet(peer.endpoint)
