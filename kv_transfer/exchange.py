"""The hand-off of one process without its thread: peers, sender and receiver over a transport.

One turn: look for notifications, then work: one push, what was found, timers, ends of pushes.
Commands run between the two. A chunk follows its grant, and a grant follows its `expect`, so the
`expect` of whatever a look has found was queued before that look. Everything here is
single-threaded; `TransferThread` runs it, and tests drive it turn by turn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import ParamSpec

from faults import failpoints
from kv_transfer.events import QuiesceAnswered, TransferCounters, TransferEvent
from kv_transfer.peers import Peers
from kv_transfer.receiving import Receiver
from kv_transfer.sending import Sender
from kv_transfer.settling_writes import SettlingWrites
from kv_transfer.tables import Clock
from kv_transfer.transports.processes import ProcessWatch
from kv_transfer.types import Endpoint, KvTransport, Notification, PushState
from kv_transfer.wire import (
    Chunk,
    MalformedNotification,
    Probe,
    Quiesce,
    Quiesced,
    decode,
)
from telemetry.trouble import describe

logger = logging.getLogger(__name__)

FRESH_POLL_S = 50e-6
"""While a push may end at any moment; a push takes longer only where it waits for others."""
FRESH_S = 3e-3
"""After a post the thread polls at its fastest for this long: most pushes end within it."""
ACTIVE_POLL_S = 200e-6
"""Between looks while a grant or a push is open: a small part of what a hand-off takes."""
IDLE_POLL_S = 0.02
"""Between looks while nothing is open: a peer may ask to quiesce at any time."""

P = ParamSpec("P")


class Exchange:
    """Everything that one process sends and receives."""

    def __init__(
        self,
        transport: KvTransport,
        epoch: int,
        emit: Callable[[TransferEvent], None],
        counters: TransferCounters,
        clock: Clock = time.monotonic,
    ) -> None:
        self._transport = transport
        self._on_event = emit
        self._counters = counters
        self._processes = ProcessWatch()
        self._settling = SettlingWrites(clock)
        self._found: list[Notification] = []
        """To be read by the next `work`."""
        self._later: list[Notification] = []
        """Polled after the last `look`: their `expect` may still be queued."""
        self.peers = Peers(transport, self._emit, clock)
        self.sender = Sender(transport, self.peers, self._emit, counters, clock)
        self.receiver = Receiver(epoch, self.peers, self._emit, counters, clock)
        self.peers.on_open = self.sender.peer_opened
        self.peers.on_lost = self.sender.peer_lost

    @property
    def pushes_in_progress(self) -> int:
        """Pushes that have not ended, those of self-tests included."""
        return self.sender.in_progress + self.peers.probes_in_progress

    def run_command(self, command: Callable[[Exchange], None]) -> None:
        """Runs one command."""
        self._guard(command, self)

    def meet(self, endpoint: Endpoint) -> None:
        """See `TransferThread.meet`."""
        if self.peers.is_replaced_by(endpoint):
            self.sender.peer_lost(endpoint.agent_name)
        self.peers.meet(endpoint)
        processes = [part.process for part in endpoint.parts]
        self._processes.watch(endpoint.agent_name, processes)

    def part(self, agent_name: str, proven_dead: bool) -> None:
        """See `TransferThread.part`."""
        if not proven_dead:
            self.peers.part(agent_name)
            return
        self._read_all_of(agent_name)
        self.peers.bury(agent_name)
        self.sender.peer_dead(agent_name)
        self._settling.begin(agent_name)

    def quiesce(self, decode_agent: str, message: Quiesce) -> None:
        """See `TransferThread.quiesce`."""
        if self.sender.give_up(decode_agent, message):
            self._emit(QuiesceAnswered(message.transfer_id, decode_agent, message.decode_epoch))

    def quiesced(self, prefill_agent: str, message: Quiesced) -> None:
        """See `TransferThread.quiesced`."""
        # The direct path reports what has landed, and this message may have overtaken it.
        self._read_all_of(prefill_agent)
        self.receiver.on_quiesced(prefill_agent, message)

    def turn(self) -> None:
        """Looks and works, where no command can come between the two."""
        self.look()
        self.work()

    def look(self) -> None:
        """Takes what peers have sent; commands that are queued by now come before `work`."""
        if self._later:
            self._found += self._later
            self._later.clear()
        self._found += self._transport.poll_notifications()

    def work(self) -> None:
        """Does what there is to do; bounded, apart from what peers have sent."""
        self._guard(self.sender.pump)
        found, self._found = self._found, []
        for notification in found:
            self._guard(self._dispatch, notification)
        for agent_name in self._processes.gone():
            self._guard(self.part, agent_name, True)
        for agent_name in self._settling.over():
            self._guard(self._nothing_lands_of, agent_name)
        self._guard(self.receiver.tick)
        self._guard(self.sender.tick)
        self._guard(self.peers.tick, self._is_used)
        for handle, state in self._transport.poll_pushes():
            self._guard(self._on_push, handle, state)

    def pause_s(self) -> float | None:
        """How long nothing needs a turn; None: until the next command."""
        if self.sender.has_work or self._later:
            return 0.0
        if self.sender.in_progress and self.sender.posted_ago_s() < FRESH_S:
            return FRESH_POLL_S
        if self.sender.in_progress or self.receiver.is_waiting or self.peers.any_testing:
            return ACTIVE_POLL_S
        due = [self.sender.next_after_s(), self.receiver.next_after_s()]
        if self.peers.any_known or self._settling.is_pending:
            due.append(IDLE_POLL_S)
        return min((after_s for after_s in due if after_s is not None), default=None)

    def close(self) -> None:
        """Stops watching the peers' processes."""
        self._processes.close()

    def check_invariants(self) -> None:
        """Raises AssertionError where a state machine contradicts itself."""
        self.sender.check_invariants()
        self.receiver.check_invariants()

    def _nothing_lands_of(self, agent_name: str) -> None:
        """A dead peer's aftermath is over."""
        # What the peer delivered before it died counts: it is read before pages are freed.
        self._read_all_of(agent_name)
        self.peers.fell_silent(agent_name)
        self.receiver.peer_dead(agent_name)

    def _read_all_of(self, agent_name: str) -> None:
        """Reads what one peer has sent so far, ahead of the others."""
        self._later += self._transport.poll_notifications()
        self._found = self._read_ahead(agent_name, self._found)
        self._later = self._read_ahead(agent_name, self._later)

    def _read_ahead(self, agent_name: str, waiting: list[Notification]) -> list[Notification]:
        """Reads that peer's among these; returns the others, and those that stay in their turn."""
        left: list[Notification] = []
        for notification in waiting:
            if notification.from_agent != agent_name or self._may_await_expect(notification):
                left.append(notification)
            else:
                self._guard(self._dispatch, notification)
        return left

    def _may_await_expect(self, notification: Notification) -> bool:
        """Whether it is of a transfer that is unknown so far: its `expect` may still be queued."""
        try:
            message = decode(notification.payload)
        except MalformedNotification:
            return False
        if not isinstance(message, Chunk | Quiesced):
            return False
        return self.receiver.state(message.transfer_id) is None

    def _dispatch(self, notification: Notification) -> None:
        peer = notification.from_agent
        try:
            message = decode(notification.payload)
        except MalformedNotification:
            self._counters.stale_notifications += 1
            return
        match message:
            case Chunk():
                failpoints.hit("transfer.chunk_landed")
                self.receiver.on_chunk(peer, message)
            case Quiesced():
                self.receiver.on_quiesced(peer, message)
            case Quiesce():
                self.sender.on_quiesce(peer, message)
            case Probe():
                pass

    def _on_push(self, handle: int, state: PushState) -> None:
        if not self.peers.on_push(handle, state):
            self.sender.on_push(handle, state)

    def _is_used(self, agent_name: str) -> bool:
        return self.sender.uses(agent_name) or self.receiver.uses(agent_name)

    def _emit(self, event: TransferEvent) -> None:
        self._guard(self._on_event, event)

    def _guard(self, do: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """One transfer's trouble is not the others': logged, without its content."""
        try:
            do(*args, **kwargs)
        except Exception as error:
            logger.error("transfer step failed: %s", describe(error))
