"""What a prefill worker adds to the engine: grants, sending KV as chunks finish, the first token.

The states of an attempt:

1. RECEIVED: submitted to the engine.
2. COMPUTING: its first chunk was launched. Chunks go from the step thread straight to the transfer
   thread, from the moment that the grant is known (`prefill_service.outgoing`).
3. SENDING: the first token of every choice is with the router; the KV is on its way, or waits for
   its grant, for a bounded time.
4. DELIVERED: all of it is over there. PrefillDone; the pages go back.
5. QUIESCING: ended in any other way: by the router, the end of its stream, the decode side, a
   failure or the deadline, or because every choice ended with its first token or no hand-off was
   wanted.
6. QUIESCED: nothing of it can leave this worker any more; the pages go back.

An attempt that was never granted goes from any state straight to QUIESCED. A grant that comes for
one that is over leaves a tombstone at the transfer thread, which answers the decode side's Quiesce.

Invariants: the engine's pages are released once, after `Sent`, after `SendQuiesced`, or where no
grant was ever known; the router hears of an attempt's end once, and nothing after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from baton.worker.v1 import worker_pb2
from baton.worker_attempts import AttemptsService
from baton.worker_outbox import LoopInbox, Outbox
from baton.worker_spans import KV_TRANSFER
from baton.worker_wire import (
    encode_first_tokens,
    kv_tokens,
    pages_of,
    scores_message,
)
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
from kv_transfer.events import SendFailed, SendQuiesced, SendStats, Sent, TransferEvent
from kv_transfer.specs import TRANSFER_ID_BYTES
from prefill_service import spans
from prefill_service.attempt import PrefillAttempt, PrefillState
from prefill_service.figures import PrefillFigures
from prefill_service.messages import done_message, finished_message, first_token_message
from prefill_service.outgoing import Destination, OutgoingPrompt
from prefill_service.ports import PrefillEngine, SendingThread
from telemetry import failpoints
from telemetry.worker_metrics import WorkerMetrics

logger = logging.getLogger(__name__)

GRANT_WAIT_S: Final = 30.0
"""Computed KV waits so long for its grant."""


class PrefillService(AttemptsService[PrefillAttempt]):
    """Attempts with WORK_MODE_PREFILL. Everything runs on the event loop, but for the sink."""

    def __init__(
        self,
        engine: PrefillEngine,
        transfer: SendingThread,
        inbox: LoopInbox,
        metrics: WorkerMetrics,
        *,
        page_size_tokens: int,
        path_to: Callable[[str], str] = lambda _agent_name: "",
        grant_wait_s: float = GRANT_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._engine = engine
        self._transfer = transfer
        self._inbox = inbox
        self._metrics = metrics
        self._page_size_tokens = page_size_tokens
        self._path_to = path_to
        self._grant_wait_s = grant_wait_s
        self._outgoing: dict[bytes, OutgoingPrompt] = {}
        """By attempt; also read by the step thread."""
        self.figures = PrefillFigures(self._attempts, self._outgoing)
        self._by_transfer: dict[bytes, PrefillAttempt] = {}
        self._sink: Sink = self._on_step

    # What the router says.

    def submit(self, submit: worker_pb2.Submit, stream: Outbox) -> None:
        """New work. One whose id was here before is ignored.

        Raises:
            MalformedMessage: it cannot be run as it is.
        """
        if not self._attempts.is_new(submit.attempt_id):
            return
        attempt = PrefillAttempt.received(submit, stream, self._attempts.clock())
        attempt.deadline_s = attempt.expires_s
        self._attempts.add(attempt)
        failpoints.hit("prefill.submitted", len(attempt.request.prompt_ids))
        self._outgoing[attempt.id] = OutgoingPrompt(
            self._transfer,
            kv_tokens(attempt.request),
            self._page_size_tokens,
            attempt.traceparent,
        )
        self._engine.submit(attempt.request, self._sink)

    def grant(self, grant: worker_pb2.Grant, stream: Outbox) -> None:
        """Where the pages of an attempt go."""
        failpoints.hit("prefill.granted")
        attempt = self._attempts.of(grant.attempt_id, stream)
        outgoing = self._outgoing.get(grant.attempt_id)
        if attempt is None or outgoing is None:
            self._refuse(grant)
            return
        if outgoing.destination is not None:
            return
        num_pages = pages_of(outgoing.num_tokens, self._page_size_tokens)
        destination = Destination.of(grant, attempt.peer, num_pages)
        if destination is None or destination.transfer_id in self._by_transfer:
            self._refuse(grant)
            attempt.fail(worker_pb2.FAILURE_REASON_KV_TRANSFER)
            self._end_early(attempt, "bad_grant")
            return
        attempt.expires_s = attempt.deadline_s
        self._by_transfer[destination.transfer_id] = attempt
        if attempt.state is PrefillState.SENDING:
            attempt.sending_s = self._attempts.clock()
        outgoing.grant(destination)

    # What the engine says.

    def _on_step(self, events: Sequence[Event]) -> None:
        """The sink, on the step thread.

        The event loop gets a chunk's event before whatever follows it, up to `Sent`, but is woken
        only after the transfer thread was told: awake, it would compete for the interpreter.
        """
        self._inbox.put(partial(self._take_events, events))
        self._tell_chunks(events)
        self._inbox.wake()

    def _tell_chunks(self, events: Sequence[Event]) -> None:
        """A chunk that cannot be told ends its own attempt, on the event loop, and no other's."""
        ends = {event.request_id: event for event in events if isinstance(event, Prefilled)}
        for event in events:
            if not isinstance(event, ChunkComputed):
                continue
            try:
                self._tell_chunk(event, ends.get(event.request_id))
            except Exception:
                logger.exception("a chunk could not be told")
                self._inbox.put(partial(self._chunk_lost, event.request_id))

    def _tell_chunk(self, event: ChunkComputed, prefilled: Prefilled | None) -> None:
        outgoing = self._outgoing.get(event.request_id)
        if outgoing is None:
            return
        failpoints.hit("prefill.chunk", outgoing.num_tokens)
        if prefilled is None or event.end_token < outgoing.num_tokens:
            outgoing.chunk(event.pages, event.end_token, None)
        elif not all(prefilled.ends):
            payload = encode_first_tokens(prefilled.records, prefilled.at_ns)
            outgoing.chunk(event.pages, event.end_token, payload)

    def _chunk_lost(self, attempt_id: bytes) -> None:
        """What its step said of the attempt was told before; one that is over needs no chunk."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.state is not PrefillState.QUIESCING:
            self._give_up(attempt)

    def _take_events(self, events: Sequence[Event]) -> None:
        for event in events:
            assert not isinstance(event, NewTokens), "nothing decodes here"
            if (attempt := self._attempts.get(event.request_id)) is not None:
                with self._ending_if_broken(attempt):
                    self._take_event(attempt, event)

    def _take_event(self, attempt: PrefillAttempt, event: EventOfOne) -> None:
        if attempt.state is PrefillState.QUIESCING:
            return
        match event:
            case PrefillStarted():
                attempt.state = PrefillState.COMPUTING
                attempt.started_ns = event.at_ns
                attempt.cached_tokens = attempt.computed_tokens = event.cached_tokens
            case ChunkComputed():
                attempt.computed_tokens = event.end_token
                attempt.chunks += 1
            case PromptScored():
                attempt.tell(prompt_logprobs=scores_message(attempt.id, event.records))
            case Prefilled():
                self._prefilled(attempt, event)
            case RequestFailed():
                attempt.fail(event.reason)
                self._end_early(attempt, event.reason.value)
            case _:
                logger.error("unexpected event: %s", type(event).__qualname__)

    def _prefilled(self, attempt: PrefillAttempt, event: Prefilled) -> None:
        attempt.computed_ns = event.at_ns
        failpoints.hit("prefill.first_token", len(attempt.request.prompt_ids))
        attempt.tell(first_token=first_token_message(attempt, event))
        self._tell_ends(attempt, event)
        attempt.state = PrefillState.SENDING
        if all(event.ends) or not attempt.peer:
            self._end_early(attempt)
        elif self._outgoing[attempt.id].destination is None:
            wait_s = failpoints.wait_s("prefill.grant_wait", self._grant_wait_s)
            granted_by_s = self._attempts.clock() + wait_s
            attempt.expires_s = min(attempt.deadline_s, granted_by_s)
        else:
            attempt.sending_s = self._attempts.clock()

    def _tell_ends(self, attempt: PrefillAttempt, event: Prefilled) -> None:
        for choice, reason in enumerate(event.ends):
            if reason is None:
                continue
            attempt.choices_left -= 1
            finished = finished_message(attempt, choice, reason, event.at_ns)
            attempt.tell(finished=finished)

    # What the transfer thread says.

    def on_transfer(self, event: TransferEvent) -> None:
        """Takes an event of the transfer thread; those of other owners are ignored."""
        if not isinstance(event, Sent | SendQuiesced | SendFailed):
            return
        attempt = self._by_transfer.get(event.transfer_id)
        if attempt is None:
            return
        with self._ending_if_broken(attempt):
            match event:
                case Sent():
                    failpoints.hit("prefill.sent")
                    self._count(attempt, event.stats)
                    self._end(attempt, event.stats)
                case SendFailed():
                    self._metrics.transfer_failed(event.cause)
                    attempt.fail(worker_pb2.FAILURE_REASON_KV_TRANSFER)
                    self._end_early(attempt, event.cause)
                case SendQuiesced():
                    self._quiesced(attempt)

    def _count(self, attempt: PrefillAttempt, stats: SendStats) -> None:
        wire_s = (stats.done_ns - stats.started_ns) / 1e9
        exposed_s = (stats.done_ns - attempt.computed_ns) / 1e9
        self._metrics.sent(self._path_to(attempt.peer), wire_s, exposed_s)

    def _quiesced(self, attempt: PrefillAttempt) -> None:
        """Asked for by this side, or by the decode side, which wants no more of it."""
        if attempt.state is not PrefillState.QUIESCING:
            if attempt.state is not PrefillState.SENDING:
                attempt.fail(worker_pb2.FAILURE_REASON_KV_TRANSFER)
            self._stop(attempt, KV_TRANSFER)
        self._end(attempt)

    # How attempts end.

    def _end_early(self, attempt: PrefillAttempt, error: str = "") -> None:
        """-> QUIESCING, and where nothing was granted at once on to QUIESCED."""
        if attempt.state is PrefillState.QUIESCING:
            return
        destination = self._stop(attempt, error)
        if destination is None:
            self._end(attempt)
        else:
            self._transfer.abort_send(destination.transfer_id)

    def _stop(self, attempt: PrefillAttempt, error: str) -> Destination | None:
        """-> QUIESCING: no more is computed, and the transfer thread hears of no more chunks."""
        if not attempt.computed_ns:
            spans.write_compute(attempt, error)
        attempt.state, attempt.error = PrefillState.QUIESCING, error
        attempt.expires_s = float("inf")
        self._engine.cancel(attempt.id)
        outgoing = self._outgoing[attempt.id]
        destination = outgoing.close()
        if destination is not None and attempt.sending_s is None:
            attempt.sending_s = self._attempts.clock()
        self._end_span(outgoing, attempt)
        return destination

    def _end(self, attempt: PrefillAttempt, stats: SendStats | None = None) -> None:
        """-> DELIVERED or QUIESCED: the pages go back."""
        self._engine.release(attempt.id)
        outgoing = self._outgoing.pop(attempt.id)
        destination = outgoing.close()
        if destination is not None:
            del self._by_transfer[destination.transfer_id]
        self._attempts.end(attempt.id)
        attempt.tell(prefill_done=done_message(attempt, stats))
        # Not when it was computed: that is when the KV leaves, and spans take as long as posting.
        if attempt.computed_ns:
            spans.write_compute(attempt)
        if attempt.state is not PrefillState.QUIESCING:
            self._end_span(outgoing, attempt, stats)

    def _end_span(
        self, outgoing: OutgoingPrompt, attempt: PrefillAttempt, stats: SendStats | None = None
    ) -> None:
        if (destination := outgoing.destination) is not None:
            spans.end_send(attempt, outgoing, stats, self._path_to(destination.peer))

    def _refuse(self, grant: worker_pb2.Grant) -> None:
        """Nothing will come of the grant: a tombstone, for the decode side to learn of."""
        is_id = len(grant.transfer_id) == TRANSFER_ID_BYTES
        if is_id and grant.transfer_id not in self._by_transfer:
            self._transfer.abort_send(grant.transfer_id)
