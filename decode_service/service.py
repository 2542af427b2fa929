"""What a decode worker adds to the engine: it grants pages, and delivered requests join its batch.

The states of a leg:

1. WAITING: for its peer's share of the pool (`decode_service.peer_pages`). Then it is submitted to
   the engine, which reserves slots and pages when there is room.
2. GRANTED: the transfer thread expects the pages, and the prefill worker may write them. It may
   have written some already (the transfer thread calls that FILLING).
3. READY: all are written. The transfer thread sends the engine the first token of every choice.
4. RUNNING: in the batch.
5. ENDED: the last choice ended, or the leg failed or was cancelled in 1, 3 or 4.
6. QUARANTINED: the router, its stream or a timeout ended it in 2. A write may still land.
7. FREE: no write can land any more, and the pages go back.

A leg that this worker runs whole goes 1 -> 4 -> 5. So does a leg that it takes over in 1, because
its prefix cache holds most of the prompt. The engine decides that, and the router hears of it
instead of a grant. From then on no Abort ends the leg: it needs no other worker.

Only the transfer thread decides whether a leg in 2 became READY or QUARANTINED. `abort_receive`
asks it. If the leg was READY already, it goes on after the router's Abort. After any other end its
pages are freed.

The outcome is known in 5 or in 6. That is when the spans of the leg are written, all at once.

Invariants: the transfer thread expects a transfer before anyone hears of it. The pages of a
granted leg are released once, after `ReceiveFreed` or if it was READY. The router hears of a leg's
end once, and nothing after it but the answer to an Abort. The tokens of RUNNING legs leave by
`decode_service.token_stream`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2
from decode_service import spans
from decode_service.leg import DecodeLeg, DecodeState, answer_abort
from decode_service.peer_pages import PeerPages
from decode_service.stats import DecodeStats
from decode_service.token_stream import TokenStream
from engine.types import (
    Event,
    EventOfOne,
    Joined,
    NewTokens,
    PrefillStarted,
    PromptScored,
    RequestFailed,
    Reserved,
    SequenceEnded,
    Sink,
    TakenOver,
)
from faults import failpoints
from kv_transfer.events import (
    Delivered,
    ReceiveAborted,
    ReceiveExpired,
    ReceiveFreed,
    TransferEvent,
)
from kv_transfer.specs import TRANSFER_ID_BYTES, ReceiveSpec
from telemetry.metrics.worker import WorkerMetrics
from worker_base.legs import CANCELLED, EXPIRED, KV_TRANSFER, LegService
from worker_base.messages import (
    MalformedMessage,
    decode_first_tokens,
    first_tokens,
    kv_tokens,
    scores_message,
    tokens_message,
)
from worker_base.outbox import CallOnLoop, Outbox
from worker_base.page_layout import PageLayout

if TYPE_CHECKING:
    from engine.engine import Engine
    from kv_transfer.thread import TransferThread

logger = logging.getLogger(__name__)

GRANT_TIMEOUT_S: Final = 120.0
"""A grant expires after this time: enough for the prefill worker's queue and a long prompt."""


class DecodeService(LegService[DecodeLeg]):
    """Legs with WORK_MODE_DECODE and WORK_MODE_WHOLE. Runs on the event loop."""

    def __init__(
        self,
        engine: Engine,
        transfer: TransferThread,
        call_on_loop: CallOnLoop,
        metrics: WorkerMetrics,
        *,
        epoch: int,
        agent_name: str,
        layout: PageLayout,
        max_bytes_per_peer: int,
        drafts_cause: Callable[[str], str] | None = None,
        grant_timeout_s: float = GRANT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._engine = engine
        self._transfer = transfer
        self._call_on_loop = call_on_loop
        self._epoch = epoch
        self._agent_name = agent_name
        self._layout = layout
        self._metrics = metrics
        self._drafts_cause = drafts_cause
        """Why a peer sends nothing for this worker's draft head; None: there is none."""
        self._grant_timeout_s = grant_timeout_s
        self._token_stream = TokenStream(self._legs, metrics)
        self._by_transfer: dict[bytes, DecodeLeg] = {}
        self._peer_pages = PeerPages(max_bytes_per_peer)
        self.stats = DecodeStats(self._legs, max_bytes_per_peer)
        self._sink: Sink = self._on_step

    # Messages of the router.

    def submit(self, submit: worker_pb2.Submit, stream: Outbox) -> None:
        """Takes new work on. It is ignored if its id was here before.

        Raises:
            MalformedMessage: it cannot be run as it is.
        """
        if not self._legs.is_new(submit.attempt_id):
            return
        leg = DecodeLeg.received(submit, stream, self._legs.clock())
        self._legs.add(leg)
        failpoints.hit("decode.submitted", len(leg.request.prompt_ids))
        if leg.is_whole or self._has_share(leg):
            self._engine.submit(leg.request, self._sink)

    def _has_share(self, leg: DecodeLeg) -> bool:
        """Whether its peer may have its pages, too. If not, the leg waits in `PeerPages`."""
        leg.share_bytes = self._layout.prompt_bytes(kv_tokens(leg.request))
        first = bool(leg.request.generated)
        return self._peer_pages.take(leg.id, leg.peer, leg.share_bytes, first=first)

    def _give_share_back(self, leg: DecodeLeg) -> None:
        """Ends the peer's claim on the leg's pages. Legs that waited for them go to the engine."""
        for leg_id in self._peer_pages.give_back(leg.id):
            if (waiting := self._legs.get(leg_id)) is not None:
                self._engine.submit(waiting.request, self._sink)

    def abort(self, leg_id: bytes, stream: Outbox) -> None:
        """Ends the leg unless its KV is here (compare-and-set). It is always answered."""
        leg = self._legs.of(leg_id, stream)
        if leg is None:
            if self._legs.is_new(leg_id):
                self._legs.end(leg_id)
            ready = self._legs.was_ready(leg_id)
            answer_abort(stream, leg_id, already_ready=ready)
        elif leg.state is DecodeState.GRANTED:
            if not leg.abort_wanted:
                leg.abort_wanted = True
                self._transfer.abort_receive(leg.transfer_id)
        else:
            answer_abort(stream, leg_id, already_ready=leg.has_kv)
            if leg.state is DecodeState.WAITING and not leg.has_kv:
                self.cancel(leg_id, stream)

    # Events of the engine.

    def _on_step(self, events: Sequence[Event]) -> None:
        """The sink, on the step thread."""
        self._call_on_loop(partial(self._take_events, events))

    def _take_events(self, events: Sequence[Event]) -> None:
        """Takes the events of one step. Its tokens leave in one message for each router."""
        for event in events:
            if isinstance(event, NewTokens):
                for broken in self._token_stream.new_tokens(event):
                    self._give_up(broken)
            elif (leg := self._legs.get(event.request_id)) is not None:
                with self._ending_if_broken(leg):
                    self._take_event(leg, event)

    def _take_event(self, leg: DecodeLeg, event: EventOfOne) -> None:
        if leg.state is DecodeState.QUARANTINED:
            return
        match event:
            case Reserved():
                self._reserved(leg, event)
            case TakenOver():
                self._take_over(leg, event)
            case PrefillStarted():
                leg.started_ns = event.at_ns
                leg.cached_tokens = event.cached_tokens
                leg.loaded_tokens = event.loaded_tokens
            case PromptScored():
                leg.send(prompt_logprobs=scores_message(leg.id, event.records))
            case Joined():
                leg.state = DecodeState.RUNNING
                leg.joined_ns = event.at_ns
                if leg.is_whole and leg.request.beams is not None and not leg.computed_ns:
                    leg.compute(event.at_ns)  # No token will show it: they come with the end.
                    leg.send_first_tokens(())
            case SequenceEnded():
                self._token_stream.choice_ended(leg, event)
                if event.last:
                    self._end(leg, was_ready=True)
            case RequestFailed():
                leg.fail(event.reason, event.hook)
                self._end_early(leg, event.reason.value)
            case _:
                logger.error("unexpected event: %s", type(event).__qualname__)

    def _reserved(self, leg: DecodeLeg, event: Reserved) -> None:
        """WAITING -> GRANTED."""
        failpoints.hit("decode.before_grant")
        cause = "" if self._drafts_cause is None else self._drafts_cause(leg.peer)
        if cause:
            self._metrics.drafts_degraded(cause)
        drafts = self._drafts_cause is not None and not cause
        leg.reserve(secrets.token_bytes(TRANSFER_ID_BYTES), event, drafts=drafts)
        self._by_transfer[leg.transfer_id] = leg
        self._transfer.expect(
            ReceiveSpec(
                transfer_id=leg.transfer_id,
                peer=leg.peer,
                ranges=leg.ranges,
                num_tokens=kv_tokens(leg.request),
                timeout_s=self._grant_lasts_s(leg),
                on_ready=partial(self._ready, leg.id, leg.request.first_tokens, drafts),
            )
        )
        leg.send_granted(event, self._epoch, self._agent_name)
        failpoints.hit("decode.after_grant")

    def _ready(self, leg_id: bytes, choices: int, drafts: bool, payload: bytes) -> None:
        """All pages have landed. On the transfer thread: it calls the engine at once, since a step
        is about to leave, and this loop may be busy. `_delivered` finds what is malformed. The
        engine ignores requests that were cancelled or were delivered before."""
        failpoints.hit("decode.ready")
        with contextlib.suppress(MalformedMessage):
            first = decode_first_tokens(payload, choices)
            self._engine.deliver(leg_id, first.records, first.drafted_from if drafts else None)

    def _grant_lasts_s(self, leg: DecodeLeg) -> float:
        """How long a grant lasts: no longer than its leg."""
        left_s = leg.expires_s - self._legs.clock()
        usual_s = min(self._grant_timeout_s, max(0.0, left_s))
        return failpoints.wait_s("decode.grant_timeout", usual_s)

    def _take_over(self, leg: DecodeLeg, event: TakenOver) -> None:
        """Computes the prompt here after all."""
        leg.took_over, leg.cached_tokens = True, event.cached_tokens
        self._give_share_back(leg)
        taken_over = worker_pb2.TakenOver(
            attempt_id=leg.id, cached_prompt_tokens=event.cached_tokens
        )
        leg.send(taken_over=taken_over)

    # Events of the transfer thread.

    def on_transfer(self, event: TransferEvent) -> None:
        """Takes an event of the transfer thread, and ignores those of other owners."""
        if not isinstance(event, Delivered | ReceiveAborted | ReceiveExpired | ReceiveFreed):
            return
        leg = self._by_transfer.get(event.transfer_id)
        if leg is None:
            return
        with self._ending_if_broken(leg):
            match event:
                case Delivered():
                    self._delivered(leg, event)
                case ReceiveAborted():
                    self._receive_aborted(leg, already_ready=event.already_ready)
                case ReceiveExpired():
                    self._receive_expired(leg)
                case ReceiveFreed():
                    self._free(leg)

    def _delivered(self, leg: DecodeLeg, event: Delivered) -> None:
        """GRANTED -> READY, unless this side gave the leg up before it heard."""
        if leg.state is not DecodeState.GRANTED:
            return
        failpoints.hit("decode.delivered")
        leg.receive(event)
        try:
            first = decode_first_tokens(event.payload, leg.request.first_tokens)
        except MalformedMessage:
            leg.answer_wanted_abort(already_ready=True)
            leg.fail(worker_pb2.FAILURE_REASON_KV_TRANSFER)
            self._end_early(leg, KV_TRANSFER)
            return
        leg.first_token_ns = first.sampled_ns
        # Again: `_ready` may have failed.
        self._engine.deliver(leg.id, first.records, first.drafted_from if leg.drafts else None)
        if leg.drafts and first.drafted_from > leg.ranges[0].first:
            self._metrics.drafts_degraded("pages_without")
        self._give_share_back(leg)
        delivered = worker_pb2.Delivered(attempt_id=leg.id, delivered_unix_ns=event.delivered_ns)
        leg.send(delivered=delivered)
        leg.answer_wanted_abort(already_ready=True)
        if leg.request.beams is None:
            tokens = first_tokens(leg.request, first.records, event.delivered_ns)
            leg.send(tokens=tokens_message(tokens, range(len(first.records))))

    def _receive_aborted(self, leg: DecodeLeg, *, already_ready: bool) -> None:
        """Takes the answer to `abort_receive`, for the router's Abort or an end from this side."""
        leg.answer_wanted_abort(already_ready=already_ready)
        if already_ready:
            self._free(leg)
        elif leg.state is DecodeState.GRANTED:
            leg.silent = True
            self._quarantine(leg, CANCELLED)

    def _receive_expired(self, leg: DecodeLeg) -> None:
        if leg.state is not DecodeState.GRANTED:
            return
        leg.answer_wanted_abort(already_ready=False)
        leg.fail(worker_pb2.FAILURE_REASON_EXPIRED)
        self._quarantine(leg, EXPIRED)

    # How legs end.

    def _end_early(self, leg: DecodeLeg, error: str = "") -> None:
        """-> QUARANTINED if a write may still land, otherwise -> ENDED."""
        if leg.state is DecodeState.QUARANTINED:
            return
        if leg.state is DecodeState.GRANTED:
            self._transfer.abort_receive(leg.transfer_id)
            self._quarantine(leg, error)
        else:
            self._engine.cancel(leg.id)
            self._engine.release(leg.id)
            self._end(leg, was_ready=leg.has_kv, error=error)

    def _end(self, leg: DecodeLeg, *, was_ready: bool, error: str = "") -> None:
        """-> ENDED."""
        leg.conclude(error)
        self._forget(leg, was_ready)
        spans.write_spans(leg, self._layout, self._engine.rank_skew_s)

    def _quarantine(self, leg: DecodeLeg, error: str) -> None:
        """GRANTED -> QUARANTINED: out of its slots. The pages wait for `ReceiveFreed`."""
        failpoints.hit("decode.quarantined")
        leg.conclude(error)
        leg.state, leg.expires_s = DecodeState.QUARANTINED, math.inf
        leg.quarantined_s = self._legs.clock()
        self._engine.cancel(leg.id)
        spans.write_spans(leg, self._layout, self._engine.rank_skew_s)

    def _free(self, leg: DecodeLeg) -> None:
        """QUARANTINED -> FREE. A leg in another state goes on."""
        if leg.state is DecodeState.QUARANTINED:
            self._engine.release(leg.id)
            self._forget(leg, was_ready=False)

    def _forget(self, leg: DecodeLeg, was_ready: bool) -> None:
        self._by_transfer.pop(leg.transfer_id, None)
        self._legs.end(leg.id, was_ready)
        self._give_share_back(leg)
