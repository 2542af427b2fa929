"""The peers of a process: wiring up, the self-test, parting.

1. `meet` opens the peer at once (sends may start), then pushes between the scratch pages: one page
   to warm the path up, a few single ones for the latency, and one large push for the bandwidth.
   PeerOpened follows with what it measured; without it after `SELF_TEST_S`, and again when they are
   there. Meeting again an open peer only repeats PeerOpened.
2. A push that fails, or a notification that cannot be sent, makes the peer lost: PeerFailed. It is
   opened anew when it is met again, and tried with back-off in between: a quarantine can end only
   over this path. A trial that succeeds is a new PeerOpened; one that fails is silent.
3. `part`: a peer that merely left may still ask to quiesce, or owe the answer, so the connection
   is kept for `PARTED_S` and for as long as a transfer needs it. A peer proven dead is closed at
   once and never opened again.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from faults import failpoints
from kv_transfer.events import PeerFailed, PeerOpened, TransferEvent
from kv_transfer.tables import BoundedMemory, Clock
from kv_transfer.types import SCRATCH_PAGE, Endpoint, KvTransport, PushState, TransportError
from kv_transfer.wire import Message, Probe, encode

logger = logging.getLogger(__name__)

SELF_TEST_BYTES = {"DRAM": 4 << 20, "VRAM": 64 << 20}
"""By the kind of the pool's memory: enough to reach the path's full speed."""
SELF_TEST_S = 0.05
LATENCY_PROBES = 3
"""Single pages, the fastest of which counts."""
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
PARTED_S = 3600.0
MAX_DEAD_PEERS = 4096
DEAD_PEER_AGE_S = 86_400.0
DISCONNECTED = "disconnected"
"""Cause word of a transport whose path to a peer broke."""


class PeerState(enum.IntEnum):
    """State of a peer; failure is the smallest."""

    LOST = 0
    """The path broke; nothing is sent that way until a push over it succeeded."""
    TESTING = 1
    """Open, and being measured."""
    OPEN = 2
    """Open, and reported so."""


@dataclass(slots=True, eq=False)
class _Peer:
    endpoint: Endpoint
    opened_s: float
    state: PeerState = PeerState.TESTING
    probes: int = 0
    """Pushes of the self-test that have ended since the peer was opened."""
    parted_s: float | None = None
    probe: int | None = None
    probe_pages: int = 0
    probe_began_s: float = 0.0
    gigabytes_per_s: float = 0.0
    latency_us: float = 0.0
    retry_at_s: float = 0.0
    retry_after_s: float = FIRST_RETRY_S


class Peers:
    """Every peer of this process. Not thread-safe: the transfer thread's."""

    def __init__(
        self,
        transport: KvTransport,
        emit: Callable[[TransferEvent], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._transport = transport
        self._emit = emit
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._processes: BoundedMemory[str, tuple[str, ...]] = BoundedMemory(
            MAX_DEAD_PEERS, DEAD_PEER_AGE_S, clock
        )
        """Processes of peers that are not known any more, or could not be opened."""
        self._dead: BoundedMemory[str, bool] = BoundedMemory(MAX_DEAD_PEERS, DEAD_PEER_AGE_S, clock)
        """Dead peers, and whether nothing of theirs is under way any more."""
        self.on_open: Callable[[str], None] = lambda agent_name: None
        """Set by the owner: called with the name of a peer to which sends may start."""
        self.on_lost: Callable[[str], None] = lambda agent_name: None
        """Set by the owner: called with the name of a peer whose path broke."""

    def is_open(self, agent_name: str) -> bool:
        """Whether pages can be pushed to this peer."""
        peer = self._peers.get(agent_name)
        return peer is not None and peer.state >= PeerState.TESTING

    def is_dead(self, agent_name: str) -> bool:
        """Whether this peer's process was proven gone."""
        return agent_name in self._dead

    def is_silent(self, agent_name: str) -> bool:
        """Whether it is dead, and nothing that it had posted can land any more."""
        return bool(self._dead.get(agent_name))

    def is_replaced_by(self, endpoint: Endpoint) -> bool:
        """Whether another peer is known under the name of this one."""
        peer = self._peers.get(endpoint.agent_name)
        return peer is not None and peer.endpoint != endpoint

    def processes_of(self, agent_name: str) -> tuple[str, ...]:
        """Its processes, as `Endpoint.process` names them, also when its path is lost; none: it is
        unknown for long."""
        if (peer := self._peers.get(agent_name)) is not None:
            return _processes_at(peer.endpoint)
        return self._processes.get(agent_name) or ()

    @property
    def any_known(self) -> bool:
        """Whether a notification may arrive at any time."""
        return bool(self._peers)

    @property
    def any_testing(self) -> bool:
        """Whether a self-test is running."""
        return any(peer.state is PeerState.TESTING for peer in self._peers.values())

    @property
    def probes_in_progress(self) -> int:
        """Pushes of self-tests that have not ended."""
        return sum(peer.probe is not None for peer in self._peers.values())

    def meet(self, endpoint: Endpoint) -> None:
        """Opens a peer, unless it is open already."""
        name = endpoint.agent_name
        if self.is_dead(name):
            self._emit(PeerFailed(name, "peer_dead"))
            return
        self._processes.add(name, _processes_at(endpoint))
        peer = self._peers.get(name)
        if peer is not None and peer.endpoint == endpoint and self.is_open(name):
            peer.parted_s = None
            if peer.state is PeerState.OPEN:
                self._report(peer)
            return
        self.close(name)
        try:
            self._transport.open(endpoint)
            self._peers[name] = _Peer(endpoint, self._clock())
            self._probe(self._peers[name], pages=1)
        except TransportError as error:
            self.close(name)
            logger.warning("peer %s could not be opened: %s", name, error.cause)
            self._emit(PeerFailed(name, error.cause))
            return
        self.on_open(name)

    @staticmethod
    def before_use(agent_name: str) -> None:
        """To be called before anything goes to a peer. Raises TransportError where a test has cut
        the path."""
        failpoints.hit("transfer.path", agent_name.rpartition("-")[0], error=_path_cut)

    def notify(self, agent_name: str, message: Message) -> None:
        """Sends if it can: whatever is sent this way is asked for again if it gets lost."""
        if not self.is_open(agent_name):
            return
        try:
            self.before_use(agent_name)
            self._transport.notify(agent_name, encode(message))
        except TransportError as error:
            self.failed(agent_name, error.cause)

    def failed(self, agent_name: str, cause: str) -> None:
        """Something could not be sent to a peer: lost, where the path itself is the cause."""
        if cause == DISCONNECTED:
            self.lost(agent_name, cause)

    def lost(self, agent_name: str, cause: str) -> None:
        """The path to a peer broke: nothing is sent that way until it is met again."""
        peer = self._peers.get(agent_name)
        if peer is not None and peer.state >= PeerState.TESTING:
            peer.state = PeerState.LOST
            self._retry_later(peer)
            logger.warning("peer %s was lost: %s", agent_name, cause)
            self._emit(PeerFailed(agent_name, cause))
            self.on_lost(agent_name)

    def part(self, agent_name: str) -> None:
        """A peer left, perhaps only from its router's view."""
        if agent_name in self._peers:
            self._peers[agent_name].parted_s = self._clock()

    def bury(self, agent_name: str) -> None:
        """A peer's process is proven gone."""
        self._dead.add(agent_name, self.is_silent(agent_name))
        self.close(agent_name)

    def fell_silent(self, agent_name: str) -> None:
        """Nothing that a dead peer had posted can land any more."""
        self._dead.add(agent_name, True)

    def close(self, agent_name: str) -> None:
        """Forgets a peer."""
        if (peer := self._peers.pop(agent_name, None)) is not None:
            self._processes.add(agent_name, _processes_at(peer.endpoint))
            self._transport.close(agent_name)

    def on_push(self, handle: int, state: PushState) -> bool:
        """Takes the end of a push of the self-test; false where it is somebody else's."""
        peer = next((peer for peer in self._peers.values() if peer.probe == handle), None)
        if peer is None:
            return False
        peer.probe = None
        try:
            self._go_on(peer, state)
        except TransportError as error:
            self.lost(peer.endpoint.agent_name, error.cause)
        return True

    def tick(self, is_used: Callable[[str], bool]) -> None:
        """Reports late self-tests, tries lost peers again, forgets those that left long ago.

        `is_used` says whether a transfer needs a peer.
        """
        now_s = self._clock()
        for name, peer in list(self._peers.items()):
            is_wanted = peer.parted_s is None or is_used(name)
            if peer.state is PeerState.TESTING and now_s - peer.opened_s > SELF_TEST_S:
                self._report(peer)
            elif not is_wanted and now_s - (peer.parted_s or now_s) > PARTED_S:
                self.close(name)
            elif self._is_to_be_tried(peer, now_s) and is_wanted:
                self._retry(peer)

    @staticmethod
    def _is_to_be_tried(peer: _Peer, now_s: float) -> bool:
        return peer.state is PeerState.LOST and peer.probe is None and now_s >= peer.retry_at_s

    def _go_on(self, peer: _Peer, state: PushState) -> None:
        """The next step of opening after a push between the scratch pages has ended."""
        name = peer.endpoint.agent_name
        if state is not PushState.DONE:
            self.lost(name, "self_test_failed")
            return
        if peer.state is PeerState.LOST and peer.probes:
            return  # lost meanwhile: opened anew in its time
        took_s = time.perf_counter() - peer.probe_began_s
        peer.probes += 1
        if peer.probes == 1:
            if peer.state is PeerState.LOST:
                peer.state, peer.opened_s = PeerState.TESTING, self._clock()
                peer.retry_after_s = FIRST_RETRY_S
                self.on_open(name)
            self._probe(peer, pages=1)
        elif peer.probes <= 1 + LATENCY_PROBES:
            peer.latency_us = min(1e6 * took_s, peer.latency_us or math.inf)
            last = peer.probes == 1 + LATENCY_PROBES
            self._probe(peer, pages=self._test_pages(peer.endpoint) if last else 1)
        else:
            size = peer.probe_pages * peer.endpoint.groups[0].page_bytes
            peer.gigabytes_per_s = size / took_s / 1e9
            self._report(peer)

    @staticmethod
    def _test_pages(endpoint: Endpoint) -> int:
        return max(1, SELF_TEST_BYTES[endpoint.memory] // endpoint.groups[0].page_bytes)

    def _retry(self, peer: _Peer) -> None:
        self._retry_later(peer)
        peer.probes, peer.latency_us = 0, 0.0
        self._transport.close(peer.endpoint.agent_name)
        try:
            self._transport.open(peer.endpoint)
            self._probe(peer, pages=1)
        except TransportError as error:
            logger.debug("peer %s is still lost: %s", peer.endpoint.agent_name, error.cause)

    def _retry_later(self, peer: _Peer) -> None:
        peer.retry_at_s = self._clock() + peer.retry_after_s
        peer.retry_after_s = min(2 * peer.retry_after_s, LAST_RETRY_S)

    def _probe(self, peer: _Peer, pages: int) -> None:
        scratch = np.full(pages, SCRATCH_PAGE, dtype=np.int32)
        peer.probe_pages = pages
        peer.probe_began_s = time.perf_counter()
        name = peer.endpoint.agent_name
        self.before_use(name)
        peer.probe = self._transport.push(name, scratch, scratch, encode(Probe()))

    def _report(self, peer: _Peer) -> None:
        peer.state = PeerState.OPEN
        name = peer.endpoint.agent_name
        path = self._transport.path(name)
        self._emit(PeerOpened(name, path, peer.gigabytes_per_s, peer.latency_us))


def _processes_at(endpoint: Endpoint) -> tuple[str, ...]:
    return tuple(part.process for part in endpoint.parts)


def _path_cut(failpoint: str) -> TransportError:
    return TransportError(DISCONNECTED, failpoint)
