"""Decode side of the hand-off: which granted pages are filled, and when they may be reused.

1. GRANTED      `expect`: the peer may write the granted pages.
2. FILLING      its first chunk has landed.
3. READY        every page of every group is covered exactly once and the last notification is
                here: Delivered.
4. QUARANTINED  from 1 or 2, by `abort` or by the timeout. A write may still land. The peer is
                asked to quiesce, again and again with back-off, for as long as it takes; once the
                back-off has reached its end, the owner is notified each time: QuiesceUnanswered.
5. FREE         nothing can land any more: the peer quiesced, or everything it could ever write
                has landed (coverage completed late), or its process is proven dead.

READY and QUARANTINED exclude each other, whichever comes first: one thread decides.

Invariants, per transfer, in each group whose pages [first, end) were granted:
- covered is a subset of [first, end), and no page is covered twice;
- READY implies covered == [first, end); or, of a fetch, [first, m) of group 0, where its last
  notification ends at m <= end;
- pages of all groups leave QUARANTINED together, by 5 alone, never by time.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.events import (
    Delivered,
    QuiesceUnanswered,
    ReceiveAborted,
    ReceiveExpired,
    ReceiveFreed,
    TransferCounters,
    TransferEvent,
)
from kv_transfer.peers import Peers
from kv_transfer.specs import Range, ReceiveSpec
from kv_transfer.tables import BoundedMemory, Clock, Timers
from kv_transfer.wire import Chunk, Quiesce, Quiesced
from telemetry.trouble import describe

logger = logging.getLogger(__name__)

REMEMBERED_ENDS = 1 << 18
"""Ended transfers whose late notifications are known as stale: an hour of them at 70 a second."""
REMEMBERED_S = 3600.0
"""No notification is on its way for longer than a request may last."""
FIRST_ASK_AGAIN_S = 0.02
"""A peer that lives answers a Quiesce within a turn of its thread."""
LAST_ASK_AGAIN_S = 1.0
"""From then on the routers are asked, too, as often."""


class ReceiveState(enum.IntEnum):
    """State of a transfer at the decode side; failure is the smallest."""

    QUARANTINED = 0
    """Given up, but a write may still land."""
    FREE = 1
    """Given up, and nothing can land any more."""
    GRANTED = 2
    """Nothing has landed yet."""
    FILLING = 3
    """Some pages have landed."""
    READY = 4
    """All pages have landed."""


@dataclass(slots=True, eq=False)
class _Receive:
    spec: ReceiveSpec
    fenced: bool
    """Nothing more can land: the peer quiesced by itself, or is dead and its aftermath over."""
    granted_ns: int
    expires_s: float
    ask_again_s: float = FIRST_ASK_AGAIN_S
    state: ReceiveState = ReceiveState.GRANTED
    covered: list[int] = field(init=False)
    """By group; bit i: page i of the prompt has landed."""
    last: Chunk | None = None
    first_notification_ns: int = 0
    notifications: int = 0

    def __post_init__(self) -> None:
        self.covered = [0] * len(self.spec.ranges)

    def range_of(self, group: int) -> Range:
        """The pages of a group that the peer is to write."""
        granted = self.spec.ranges[group]
        if group or self.last is None or not self.spec.may_be_short:
            return granted
        return Range(granted.first, self.last.end_page)

    @property
    def landed_pages(self) -> int:
        """Leading pages of group 0 that are there. They count only in a fetch."""
        if not self.spec.may_be_short:
            return 0
        first, end = self.spec.ranges[0]
        missing = ~(self.covered[0] | _bits(0, first))
        return min((missing & -missing).bit_length() - 1, end)

    @property
    def is_complete(self) -> bool:
        if self.last is None:
            return False
        return all(
            covered == _bits(*self.range_of(group)) for group, covered in enumerate(self.covered)
        )


class Receiver:
    """Every transfer this process granted. Not thread-safe: the transfer thread's."""

    def __init__(
        self,
        epoch: int,
        peers: Peers,
        emit: Callable[[TransferEvent], None],
        counters: TransferCounters,
        clock: Clock = time.monotonic,
    ) -> None:
        self._epoch = epoch
        self._peers = peers
        self._emit = emit
        self._counters = counters
        self._clock = clock
        self._receives: dict[bytes, _Receive] = {}
        self._ended: BoundedMemory[bytes, ReceiveState] = BoundedMemory(
            REMEMBERED_ENDS, REMEMBERED_S, clock
        )
        self._timers = Timers(clock)
        self._waiting = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a transfer is GRANTED or FILLING."""
        return self._waiting > 0

    def state(self, transfer_id: bytes) -> ReceiveState | None:
        """State of a transfer, or None where it is unknown."""
        receive = self._receives.get(transfer_id)
        return receive.state if receive is not None else self._ended.get(transfer_id)

    def uses(self, agent_name: str) -> bool:
        """Whether a transfer from this peer is unfinished, quarantine included."""
        return any(receive.spec.peer == agent_name for receive in self._receives.values())

    def next_after_s(self) -> float | None:
        """Seconds until `tick` has something to do, or None."""
        return self._timers.next_after_s()

    def expect(self, spec: ReceiveSpec) -> None:
        """-> GRANTED. A transfer id serves once: a second call with it does nothing."""
        if self.state(spec.transfer_id) is not None:
            return
        self._receives[spec.transfer_id] = _Receive(
            spec,
            fenced=self._peers.is_silent(spec.peer),
            granted_ns=time.time_ns(),
            expires_s=self._clock() + spec.timeout_s,
        )
        self._waiting += 1
        self._timers.set(spec.transfer_id, spec.timeout_s)

    def abort(self, transfer_id: bytes) -> None:
        """Compare-and-set: GRANTED or FILLING -> QUARANTINED, answered by `ReceiveAborted`.

        READY answers `already_ready`. A transfer never expected is free at once: no grant of it
        was ever sent to anybody.
        """
        receive = self._receives.get(transfer_id)
        if receive is None:
            state = self._ended.get(transfer_id)
            self._emit(ReceiveAborted(transfer_id, already_ready=state is ReceiveState.READY))
            if state is None:
                self._ended.add(transfer_id, ReceiveState.FREE)
                self._emit(ReceiveFreed(transfer_id))
            return
        landed = receive.landed_pages
        self._emit(ReceiveAborted(transfer_id, already_ready=False, landed_pages=landed))
        if receive.state is not ReceiveState.QUARANTINED:
            self._counters.transfers_aborted += 1
            self._quarantine(receive)

    def on_chunk(self, from_agent: str, chunk: Chunk) -> None:
        """Pages have landed: -> FILLING, READY or, in quarantine, perhaps FREE."""
        receive = self._receives.get(chunk.transfer_id)
        if receive is None or not self._accepts(receive, from_agent, chunk):
            self._counters.stale_notifications += 1
            return
        receive.covered[chunk.group] |= _bits(chunk.first_page, chunk.end_page)
        receive.last = chunk if chunk.last else receive.last
        receive.notifications += 1
        receive.first_notification_ns = receive.first_notification_ns or time.time_ns()
        if receive.state is ReceiveState.GRANTED:
            receive.state = ReceiveState.FILLING
        if receive.is_complete:
            self._complete(receive)

    def on_quiesced(self, from_agent: str, message: Quiesced) -> None:
        """QUARANTINED -> FREE; before an abort it is noted, and the abort frees at once."""
        receive = self._receives.get(message.transfer_id)
        if receive is None:
            # An answer to a repeated question, or one crossing the last notification, is expected.
            known = message.transfer_id in self._ended
            self._counters.stale_notifications += not known
        elif receive.spec.peer != from_agent or message.decode_epoch != self._epoch:
            self._counters.stale_notifications += 1
        else:
            self._fence(receive)

    def peer_dead(self, agent_name: str) -> None:
        """The process of a peer is proven gone, and nothing it had posted is still under way. What
        it delivered is read before this call."""
        for receive in list(self._receives.values()):
            if receive.spec.peer == agent_name:
                self._fence(receive)

    def tick(self) -> None:
        """Expires grants and repeats questions that are due."""
        for transfer_id in self._timers.pop_due():
            receive = self._receives.get(transfer_id)
            if receive is None:
                continue
            if receive.state is ReceiveState.QUARANTINED:
                self._ask(receive)
            elif self._clock() >= receive.expires_s:
                self._counters.expired_grants += 1
                self._emit(ReceiveExpired(transfer_id, receive.landed_pages))
                self._quarantine(receive)

    def check_invariants(self) -> None:
        """Raises AssertionError where the state contradicts this module's invariants."""
        states = [receive.state for receive in self._receives.values()]
        for transfer_id, receive in self._receives.items():
            assert transfer_id not in self._ended
            assert receive.state not in (ReceiveState.FREE, ReceiveState.READY)
            for group, covered in enumerate(receive.covered):
                assert not covered & ~_bits(*receive.range_of(group))
            assert not receive.is_complete
            assert receive.state is not ReceiveState.QUARANTINED or not receive.fenced
        quarantined = states.count(ReceiveState.QUARANTINED)
        assert self._counters.quarantined_transfers == quarantined
        assert self._waiting == len(states) - quarantined

    def _accepts(self, receive: _Receive, from_agent: str, chunk: Chunk) -> bool:
        spec = receive.spec
        if from_agent != spec.peer or chunk.decode_epoch != self._epoch:
            return False
        if chunk.group >= len(spec.ranges):
            return False
        first, end = receive.range_of(chunk.group)
        if chunk.first_page < first or chunk.end_page > end:
            return False
        if receive.covered[chunk.group] & _bits(chunk.first_page, chunk.end_page):
            return False
        if not chunk.last:
            return chunk.first_page < chunk.end_page
        if receive.last is not None:
            return False
        if spec.may_be_short:
            return not receive.covered[0] >> chunk.end_page
        return (chunk.end_page, chunk.end_token) == (end, spec.num_tokens)

    def _complete(self, receive: _Receive) -> None:
        """All that the peer could write has landed: READY, or the end of a quarantine."""
        if receive.state is ReceiveState.QUARANTINED:
            self._free(receive)
            return
        last = receive.last
        assert last is not None
        self._waiting -= 1
        self._counters.transfers_received += 1
        self._end(receive, ReceiveState.READY)
        self._emit(
            Delivered(
                last.transfer_id,
                last.payload,
                last.send_span_id,
                receive.granted_ns,
                receive.first_notification_ns,
                time.time_ns(),
                receive.notifications,
                last.end_page,
            )
        )
        if receive.spec.on_ready is not None:
            try:
                receive.spec.on_ready(last.payload)
            except Exception as error:  # The owner heard of it above.
                logger.error("nobody was notified sooner: %s", describe(error))

    def _quarantine(self, receive: _Receive) -> None:
        receive.state = ReceiveState.QUARANTINED
        self._waiting -= 1
        self._counters.quarantined_transfers += 1
        if receive.fenced:
            self._free(receive)
        else:
            self._ask(receive)

    def _ask(self, receive: _Receive) -> None:
        transfer_id, peer = receive.spec.transfer_id, receive.spec.peer
        self._peers.notify(peer, Quiesce(transfer_id, self._epoch))
        if receive.ask_again_s >= LAST_ASK_AGAIN_S:
            self._emit(QuiesceUnanswered(transfer_id, peer, self._peers.processes_of(peer)))
        self._timers.set(transfer_id, receive.ask_again_s)
        receive.ask_again_s = min(2 * receive.ask_again_s, LAST_ASK_AGAIN_S)

    def _fence(self, receive: _Receive) -> None:
        receive.fenced = True
        if receive.state is ReceiveState.QUARANTINED:
            self._free(receive)

    def _free(self, receive: _Receive) -> None:
        self._counters.quarantined_transfers -= 1
        self._end(receive, ReceiveState.FREE)
        self._emit(ReceiveFreed(receive.spec.transfer_id))

    def _end(self, receive: _Receive, state: ReceiveState) -> None:
        receive.state = state
        del self._receives[receive.spec.transfer_id]
        self._ended.add(receive.spec.transfer_id, state)


def _bits(first: int, end: int) -> int:
    """Bits first to end - 1."""
    return (1 << end) - (1 << first)
