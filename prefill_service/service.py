"""What a prefill worker adds to the engine: it sends the KV of prompts, and their first tokens.

The states of a leg:

1. RECEIVED: submitted to the engine.
2. COMPUTING: its first chunk was launched. Once the grant is known, chunks go from the step thread
   straight to the transfer thread (`prefill_service.outgoing`).
3. SENDING: the router has the first token of every choice. The KV is on its way, or it waits for
   its grant for a bounded time.
4. DELIVERED: the decode worker has all of it. The router gets PrefillDone, and the pages go back.
5. QUIESCING: the leg ended in any other way. The router, the end of its stream, the decode side, a
   failure or the deadline ended it; or every choice ended with its first token; or no hand-off was
   wanted.
6. QUIESCED: nothing of it can leave this worker any more, and the pages go back.

A leg that was never granted goes from any state straight to QUIESCED. A grant that comes for a leg
that is over leaves a tombstone at the transfer thread, which answers the decode side's Quiesce.

The outcome is known in 4 or in 5. That is when the spans of the leg are written, all at once.

Invariants: the engine's pages are released once, after `Sent`, after `SendQuiesced`, or if no grant
was ever known. The router hears of a leg's end once, and nothing after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2
from engine.types import (
    ChunkComputed,
    Event,
    EventOfOne,
    NewTokens,
    Prefilled,
    PrefillStarted,
    PromptScored,
    RequestFailed,
    Sink,
)
from faults import failpoints
from kv_transfer.events import SendFailed, SendQuiesced, SendStats, Sent, TransferEvent
from kv_transfer.specs import TRANSFER_ID_BYTES
from prefill_service import spans
from prefill_service.leg import PrefillLeg, PrefillState
from prefill_service.outgoing import Destination, OutgoingPrompt
from prefill_service.stats import PrefillStats
from telemetry.metrics.worker import WorkerMetrics
from worker_base.legs import KV_TRANSFER, LegService
from worker_base.messages import encode_first_tokens, kv_tokens, scores_message
from worker_base.outbox import LoopInbox, Outbox
from worker_base.page_layout import PageLayout

if TYPE_CHECKING:
    from engine.engine import Engine
    from kv_transfer.thread import TransferThread

logger = logging.getLogger(__name__)

GRANT_WAIT_S: Final = 30.0
"""Computed KV waits this long for its grant."""


class PrefillService(LegService[PrefillLeg]):
    """Legs with WORK_MODE_PREFILL. Everything runs on the event loop, except the sink."""

    def __init__(
        self,
        engine: Engine,
        transfer: TransferThread,
        inbox: LoopInbox,
        metrics: WorkerMetrics,
        *,
        layout: PageLayout,
        path_to: Callable[[str], str] = lambda _agent_name: "",
        shares_drafts: Callable[[str], bool] = lambda _agent_name: False,
        grant_wait_s: float = GRANT_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._engine = engine
        self._transfer = transfer
        self._inbox = inbox
        self._metrics = metrics
        self._layout = layout
        self._path_to = path_to
        self._shares_drafts = shares_drafts
        self._grant_wait_s = grant_wait_s
        self.stats = PrefillStats(self._legs)
        self._by_transfer: dict[bytes, PrefillLeg] = {}
        self._sink: Sink = self._on_step

    # Messages of the router.

    def submit(self, submit: worker_pb2.Submit, stream: Outbox) -> None:
        """Takes new work on. It is ignored if its id was here before.

        Raises:
            MalformedMessage: it cannot be run as it is.
        """
        if not self._legs.is_new(submit.attempt_id):
            return
        leg = PrefillLeg.received(submit, stream, self._legs.clock())
        leg.deadline_s = leg.expires_s
        leg.outgoing = OutgoingPrompt(
            self._transfer,
            kv_tokens(leg.request),
            self._layout.page_size_tokens,
            leg.traceparent,
        )
        self._legs.add(leg)
        failpoints.hit("prefill.submitted", len(leg.request.prompt_ids))
        self._engine.submit(leg.request, self._sink)

    def grant(self, grant: worker_pb2.Grant, stream: Outbox) -> None:
        """Takes the destination of a leg's pages. Only the first grant counts."""
        failpoints.hit("prefill.granted")
        leg = self._legs.of(grant.attempt_id, stream)
        if leg is None:
            self._refuse(grant)
            return
        if leg.outgoing.destination is not None:
            return
        drafts = self._shares_drafts(leg.peer)
        own = leg.outgoing.num_pages, self._layout
        destination = Destination.of(grant, leg.peer, *own, drafts=drafts)
        if destination is None or destination.transfer_id in self._by_transfer:
            self._refuse(grant)
            leg.fail(worker_pb2.FAILURE_REASON_KV_TRANSFER)
            self._end_early(leg, "bad_grant")
            return
        leg.expires_s = leg.deadline_s
        self._by_transfer[destination.transfer_id] = leg
        if leg.state is PrefillState.SENDING:
            leg.sending_s = self._legs.clock()
        leg.outgoing.grant(destination)

    def _refuse(self, grant: worker_pb2.Grant) -> None:
        """Leaves a tombstone, from which the decode side learns that nothing will be sent."""
        is_id = len(grant.transfer_id) == TRANSFER_ID_BYTES
        if is_id and grant.transfer_id not in self._by_transfer:
            self._transfer.abort_send(grant.transfer_id)

    # Events of the engine.

    def _on_step(self, events: Sequence[Event]) -> None:
        """The sink, on the step thread.

        The event loop gets a chunk's event before all events that follow from it, up to `Sent`. It
        is woken only after the transfer thread was called: it would compete for the interpreter.
        """
        self._inbox.put(partial(self._take_events, events))
        self._report_chunks(events)
        self._inbox.wake()

    def _report_chunks(self, events: Sequence[Event]) -> None:
        """Passes every chunk to the transfer thread. A chunk that breaks ends only its own leg."""
        ends = {event.request_id: event for event in events if isinstance(event, Prefilled)}
        for event in events:
            if not isinstance(event, ChunkComputed):
                continue
            try:
                self._report_chunk(event, ends.get(event.request_id))
            except Exception:
                logger.exception("a chunk could not be passed on")
                self._inbox.put(partial(self._chunk_lost, event.request_id))

    def _report_chunk(self, event: ChunkComputed, prefilled: Prefilled | None) -> None:
        leg = self._legs.get(event.request_id)
        if leg is None:
            return
        outgoing = leg.outgoing
        failpoints.hit("prefill.chunk", outgoing.num_tokens)
        if prefilled is None or event.end_token < outgoing.num_tokens:
            outgoing.chunk(event.pages, event.end_token, None, event.others)
        elif not all(prefilled.ends):
            told = prefilled.records, prefilled.at_ns, prefilled.drafted_from
            payload = encode_first_tokens(*told)
            outgoing.chunk(event.pages, event.end_token, payload, event.others)

    def _chunk_lost(self, leg_id: bytes) -> None:
        """Gives the leg up, unless the events of that step have ended it already."""
        leg = self._legs.get(leg_id)
        if leg is not None and leg.state is not PrefillState.QUIESCING:
            self._give_up(leg)

    def _take_events(self, events: Sequence[Event]) -> None:
        for event in events:
            assert not isinstance(event, NewTokens), "a prefill leg decodes nothing"
            if (leg := self._legs.get(event.request_id)) is not None:
                with self._ending_if_broken(leg):
                    self._take_event(leg, event)

    def _take_event(self, leg: PrefillLeg, event: EventOfOne) -> None:
        if leg.state is PrefillState.QUIESCING:
            return
        match event:
            case PrefillStarted():
                leg.state = PrefillState.COMPUTING
                leg.started_ns = event.at_ns
                leg.cached_tokens = leg.computed_tokens = event.cached_tokens
                leg.loaded_tokens = event.loaded_tokens
            case ChunkComputed():
                leg.computed_tokens = event.end_token
                leg.chunks += 1
            case PromptScored():
                leg.send(prompt_logprobs=scores_message(leg.id, event.records))
            case Prefilled():
                self._prefilled(leg, event)
            case RequestFailed():
                leg.fail(event.reason, event.hook)
                self._end_early(leg, event.reason.value)
            case _:
                logger.error("unexpected event: %s", type(event).__qualname__)

    def _prefilled(self, leg: PrefillLeg, event: Prefilled) -> None:
        """COMPUTING -> SENDING, and on to QUIESCING if there is nothing to send."""
        leg.computed_ns = event.at_ns
        failpoints.hit("prefill.first_token", len(leg.request.prompt_ids))
        leg.send_first_tokens(event.records)
        leg.send_ends(event)
        leg.state = PrefillState.SENDING
        if all(event.ends) or not leg.peer:
            self._end_early(leg)
        elif leg.outgoing.destination is None:
            wait_s = failpoints.wait_s("prefill.grant_wait", self._grant_wait_s)
            granted_by_s = self._legs.clock() + wait_s
            leg.expires_s = min(leg.deadline_s, granted_by_s)
        else:
            leg.sending_s = self._legs.clock()

    # Events of the transfer thread.

    def on_transfer(self, event: TransferEvent) -> None:
        """Takes an event of the transfer thread, and ignores those of other owners."""
        if not isinstance(event, Sent | SendQuiesced | SendFailed):
            return
        leg = self._by_transfer.get(event.transfer_id)
        if leg is None:
            return
        with self._ending_if_broken(leg):
            match event:
                case Sent():
                    failpoints.hit("prefill.sent")
                    self._sent(leg, event.stats)
                case SendFailed():
                    self._metrics.transfer_failed(event.cause)
                    leg.fail(worker_pb2.FAILURE_REASON_KV_TRANSFER)
                    self._end_early(leg, event.cause)
                case SendQuiesced():
                    self._quiesced(leg)

    # How legs end.

    def _sent(self, leg: PrefillLeg, stats: SendStats) -> None:
        """SENDING -> DELIVERED, or QUIESCING -> QUIESCED if all of it arrived all the same."""
        wire_s = (stats.done_ns - stats.started_ns) / 1e9
        exposed_s = (stats.done_ns - leg.computed_ns) / 1e9
        self._metrics.sent(self._path_to(leg.peer), wire_s, exposed_s)
        leg.sent = stats
        self._release(leg)
        if leg.state is not PrefillState.QUIESCING:
            leg.conclude()
            self._write_spans(leg)

    def _quiesced(self, leg: PrefillLeg) -> None:
        """-> QUIESCED. Either this side asked for that, or the decode side wants no more of it."""
        was_asked = leg.state is PrefillState.QUIESCING
        if not was_asked:
            if leg.state is not PrefillState.SENDING:
                leg.fail(worker_pb2.FAILURE_REASON_KV_TRANSFER)
            self._quiesce(leg, KV_TRANSFER)
        self._release(leg)
        if not was_asked:
            self._write_spans(leg)

    def _end_early(self, leg: PrefillLeg, error: str = "") -> None:
        """-> QUIESCING, and at once on to QUIESCED if nothing was granted."""
        if leg.state is PrefillState.QUIESCING:
            return
        self._quiesce(leg, error)
        if (destination := leg.outgoing.destination) is None:
            self._release(leg)
        else:
            self._transfer.abort_send(destination.transfer_id)
        self._write_spans(leg)

    def _quiesce(self, leg: PrefillLeg, error: str) -> None:
        """No more is computed, and the transfer thread hears of no more chunks."""
        leg.state, leg.expires_s = PrefillState.QUIESCING, float("inf")
        leg.conclude(error)
        self._engine.cancel(leg.id)
        if leg.outgoing.close() is not None and leg.sending_s is None:
            leg.sending_s = self._legs.clock()

    def _release(self, leg: PrefillLeg) -> None:
        """The pages go back, and the router hears that nothing more comes."""
        self._engine.release(leg.id)
        if (destination := leg.outgoing.close()) is not None:
            del self._by_transfer[destination.transfer_id]
        self._legs.end(leg.id)
        leg.send_done()

    def _write_spans(self, leg: PrefillLeg) -> None:
        """Comes last: the KV leaves and the engine goes on meanwhile."""
        spans.write_spans(leg, self._path_to(leg.peer), self._engine.rank_skew_s)
