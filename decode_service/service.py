"""What a decode worker adds to the engine: grants, and joining what was delivered.

The states of an attempt:

1. WAITING: for its peer's share of the pool (`decode_service.peer_pages`), then submitted to the
   engine, which reserves slots and pages when there is room.
2. GRANTED: the transfer thread expects the pages, and the prefill worker may write them. Some are
   written already, or none (FILLING is the transfer thread's own affair).
3. READY: all are written. The engine is told the first token of every choice.
4. RUNNING: in the batch.
5. ENDED: the last choice ended, or the attempt was cancelled from 1, 3 or 4, or failed.
6. QUARANTINED: ended from 2, by the router, its stream or a timeout. A write may still land.
7. FREE: no write can land any more; the pages go back.

An attempt that this worker runs whole goes 1 -> 4 -> 5. So does one that it takes over in 1: its
prefix cache holds all but a short rest of the prompt. The engine decides that, and the router is
told instead of a grant. From then on no Abort ends the attempt: it needs nobody else.

Whether an attempt in 2 became READY or QUARANTINED is decided by the transfer thread alone: who
wants to end it asks there (`abort_receive`). If the answer is that it was READY already, an attempt
that the router's Abort asked about goes on, and one that anything else ended frees its pages.

Invariants: the transfer thread expects a transfer before anyone is told of it; a granted attempt's
pages are released once, after `ReceiveFreed` or where it was READY; the router hears of an
attempt's end once, and nothing after it but the answer to an Abort. What RUNNING attempts draw
leaves by `decode_service.token_stream`.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from baton.worker.v1 import worker_pb2
from baton.worker_attempts import AttemptsService
from baton.worker_outbox import Hop, Outbox
from baton.worker_spans import CANCELLED, EXPIRED, KV_TRANSFER
from baton.worker_wire import (
    MalformedMessage,
    decode_first_tokens,
    first_tokens,
    kv_tokens,
    pages_of,
    scores_message,
    tokens_message,
)
from decode_service import spans
from decode_service.attempt import DecodeAttempt, DecodeState
from decode_service.figures import DecodeFigures
from decode_service.messages import granted_message
from decode_service.peer_pages import PeerPages
from decode_service.ports import DecodeEngine, ReceivingThread
from decode_service.token_stream import TokenStream
from engine.types import (
    ChoiceEnded,
    Event,
    EventOfOne,
    Joined,
    NewTokens,
    PromptScored,
    RequestFailed,
    Reserved,
    Sink,
    Started,
    TakenOver,
)
from kv_transfer.events import (
    Delivered,
    ReceiveAborted,
    ReceiveExpired,
    ReceiveFreed,
    TransferEvent,
)
from kv_transfer.specs import TRANSFER_ID_BYTES, ReceiveSpec
from telemetry import failpoints
from telemetry.metrics import WorkerMetrics

logger = logging.getLogger(__name__)

GRANT_TIMEOUT_S: Final = 120.0
"""A grant is used up within this time or expires: long enough for the prefill worker's queue and a
long prompt."""


class DecodeService(AttemptsService[DecodeAttempt]):
    """Attempts with WORK_MODE_DECODE and WORK_MODE_WHOLE. Runs on the event loop."""

    def __init__(
        self,
        engine: DecodeEngine,
        transfer: ReceivingThread,
        hop: Hop,
        metrics: WorkerMetrics,
        *,
        epoch: int,
        agent_name: str,
        page_bytes: int,
        page_size_tokens: int,
        max_pages_per_peer: int,
        grant_timeout_s: float = GRANT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._engine = engine
        self._transfer = transfer
        self._hop = hop
        self._epoch = epoch
        self._agent_name = agent_name
        self._page_bytes = page_bytes
        self._grant_timeout_s = grant_timeout_s
        self._token_stream = TokenStream(self._attempts, metrics)
        self._by_transfer: dict[bytes, DecodeAttempt] = {}
        self._page_size_tokens = page_size_tokens
        self._peer_pages = PeerPages(max_pages_per_peer)
        self.figures = DecodeFigures(self._attempts, max_pages_per_peer)
        self._sink: Sink = self._on_step

    # What the router says.

    def submit(self, submit: worker_pb2.Submit, stream: Outbox) -> None:
        """New work. One whose id was here before is ignored.

        Raises:
            MalformedMessage: it cannot be run as it is.
        """
        if not self._attempts.is_new(submit.attempt_id):
            return
        attempt = DecodeAttempt.received(submit, stream, self._attempts.clock())
        self._attempts.add(attempt)
        failpoints.hit("decode.submitted", len(attempt.request.prompt_ids))
        if attempt.is_whole or self._has_share(attempt):
            self._engine.submit(attempt.request, self._sink)

    def _has_share(self, attempt: DecodeAttempt) -> bool:
        """Whether its peer may have its pages, too; otherwise it waits, WAITING still."""
        pages = pages_of(kv_tokens(attempt.request), self._page_size_tokens)
        first = bool(attempt.request.generated)
        return self._peer_pages.take(attempt.id, attempt.peer, pages, first=first)

    def _give_share_back(self, attempt: DecodeAttempt) -> None:
        """The peer has no pages of it any more: the next may be granted."""
        for attempt_id in self._peer_pages.give_back(attempt.id):
            if (waiting := self._attempts.get(attempt_id)) is not None:
                self._engine.submit(waiting.request, self._sink)

    def abort(self, attempt_id: bytes, stream: Outbox) -> None:
        """Compare-and-set: ends the attempt unless its KV is here. Always answered."""
        attempt = self._attempts.of(attempt_id, stream)
        if attempt is None:
            if self._attempts.is_new(attempt_id):
                self._attempts.end(attempt_id)
            ready = self._attempts.was_ready(attempt_id)
            _answer_abort(stream, attempt_id, already_ready=ready)
        elif attempt.state is DecodeState.GRANTED:
            if not attempt.abort_wanted:
                attempt.abort_wanted = True
                self._transfer.abort_receive(attempt.transfer_id)
        else:
            _answer_abort(stream, attempt_id, already_ready=attempt.has_kv)
            if attempt.state is DecodeState.WAITING and not attempt.has_kv:
                self.cancel(attempt_id, stream)

    # What the engine says.

    def _on_step(self, events: Sequence[Event]) -> None:
        """The sink, on the step thread."""
        self._hop(partial(self._take_events, events))

    def _take_events(self, events: Sequence[Event]) -> None:
        """The events of one step; the tokens among them leave in one message per router."""
        for event in events:
            if isinstance(event, NewTokens):
                for broken in self._token_stream.new_tokens(event):
                    self._give_up(broken)
            elif (attempt := self._attempts.get(event.request_id)) is not None:
                with self._ending_if_broken(attempt):
                    self._take_event(attempt, event)

    def _take_event(self, attempt: DecodeAttempt, event: EventOfOne) -> None:
        if attempt.state is DecodeState.QUARANTINED:
            return
        match event:
            case Reserved():
                self._reserved(attempt, event)
            case TakenOver():
                self._take_over(attempt, event)
            case Started():
                attempt.started_ns = event.at_ns
                attempt.cached_tokens = event.cached_tokens
            case PromptScored():
                attempt.tell(prompt_logprobs=scores_message(attempt.id, event.records))
            case Joined():
                attempt.state = DecodeState.RUNNING
                attempt.joined_ns = event.at_ns
            case ChoiceEnded():
                self._token_stream.choice_ended(attempt, event)
                if event.last:
                    self._forget(attempt, was_ready=True)
            case RequestFailed():
                attempt.fail(event.reason)
                self._end_early(attempt, event.reason.value)
            case _:
                logger.error("unexpected event: %s", type(event).__qualname__)

    def _reserved(self, attempt: DecodeAttempt, event: Reserved) -> None:
        """WAITING -> GRANTED."""
        failpoints.hit("decode.before_grant")
        attempt.reserve(secrets.token_bytes(TRANSFER_ID_BYTES), event.pages, event.held_pages)
        self._by_transfer[attempt.transfer_id] = attempt
        self._transfer.expect(
            ReceiveSpec(
                transfer_id=attempt.transfer_id,
                peer=attempt.peer,
                num_pages=attempt.num_pages,
                held_pages=attempt.held_pages,
                num_tokens=kv_tokens(attempt.request),
                timeout_s=self._grant_lasts_s(attempt),
            )
        )
        granted = granted_message(attempt, event.pages, self._epoch, self._agent_name)
        attempt.tell(granted=granted)
        failpoints.hit("decode.after_grant")
        spans.write_grant(attempt)

    def _grant_lasts_s(self, attempt: DecodeAttempt) -> float:
        """Until it expires; no longer than the attempt."""
        left_s = attempt.expires_s - self._attempts.clock()
        usual_s = min(self._grant_timeout_s, max(0.0, left_s))
        return failpoints.wait_s("decode.grant_timeout", usual_s)

    def _take_over(self, attempt: DecodeAttempt, event: TakenOver) -> None:
        """The prompt is computed here after all."""
        attempt.took_over, attempt.cached_tokens = True, event.cached_tokens
        self._give_share_back(attempt)
        taken_over = worker_pb2.TakenOver(
            attempt_id=attempt.id, cached_prompt_tokens=event.cached_tokens
        )
        attempt.tell(taken_over=taken_over)

    # What the transfer thread says.

    def on_transfer(self, event: TransferEvent) -> None:
        """Takes an event of the transfer thread; those of other owners are ignored."""
        if not isinstance(event, Delivered | ReceiveAborted | ReceiveExpired | ReceiveFreed):
            return
        attempt = self._by_transfer.get(event.transfer_id)
        if attempt is None:
            return
        with self._ending_if_broken(attempt):
            match event:
                case Delivered():
                    self._delivered(attempt, event)
                case ReceiveAborted():
                    self._receive_aborted(attempt, already_ready=event.already_ready)
                case ReceiveExpired():
                    self._receive_expired(attempt)
                case ReceiveFreed():
                    self._free(attempt)

    def _delivered(self, attempt: DecodeAttempt, event: Delivered) -> None:
        """GRANTED -> READY, unless this side gave it up before it heard."""
        if attempt.state is not DecodeState.GRANTED:
            return
        failpoints.hit("decode.delivered")
        attempt.state, attempt.ready_ns = DecodeState.READY, event.delivered_ns
        try:
            first = decode_first_tokens(event.payload, attempt.request.choices)
        except MalformedMessage:
            spans.write_receive(attempt, event, self._page_bytes)
            self._answer_wanted_abort(attempt, already_ready=True)
            attempt.fail(worker_pb2.FAILURE_REASON_KV_TRANSFER)
            self._end_early(attempt, KV_TRANSFER)
            return
        attempt.first_token_ns = first.sampled_ns
        self._engine.deliver(attempt.id, first.records)  # before all else: a step is about to leave
        self._give_share_back(attempt)
        spans.write_receive(attempt, event, self._page_bytes)
        delivered = worker_pb2.Delivered(
            attempt_id=attempt.id, delivered_unix_ns=event.delivered_ns
        )
        attempt.tell(delivered=delivered)
        self._answer_wanted_abort(attempt, already_ready=True)
        tokens = first_tokens(attempt.request, first.records, event.delivered_ns)
        attempt.tell(tokens=tokens_message(tokens, range(len(first.records))))

    def _receive_aborted(self, attempt: DecodeAttempt, *, already_ready: bool) -> None:
        """The answer to whoever asked: the router's Abort, or an end from this side."""
        self._answer_wanted_abort(attempt, already_ready=already_ready)
        if already_ready:
            self._free(attempt)
        elif attempt.state is DecodeState.GRANTED:
            attempt.silent = True
            self._quarantine(attempt, CANCELLED)

    def _receive_expired(self, attempt: DecodeAttempt) -> None:
        if attempt.state is not DecodeState.GRANTED:
            return
        self._answer_wanted_abort(attempt, already_ready=False)
        attempt.fail(worker_pb2.FAILURE_REASON_EXPIRED)
        self._quarantine(attempt, EXPIRED)

    def _answer_wanted_abort(self, attempt: DecodeAttempt, *, already_ready: bool) -> None:
        """Answered as soon as the verdict is known: the attempt may be over before
        `ReceiveAborted` comes."""
        if attempt.abort_wanted:
            attempt.abort_wanted = False
            _answer_abort(attempt.stream, attempt.id, already_ready=already_ready)

    # How attempts end early.

    def _end_early(self, attempt: DecodeAttempt, error: str = "") -> None:
        """Ends an attempt in any state."""
        match attempt.state:
            case DecodeState.QUARANTINED:
                return
            case DecodeState.GRANTED:
                self._transfer.abort_receive(attempt.transfer_id)
                self._quarantine(attempt, error)
            case state:
                if attempt.is_whole and not attempt.computed_ns:
                    spans.write_prompt(attempt, error)
                elif state is DecodeState.WAITING:
                    spans.write_grant(attempt, error)
                else:
                    spans.write_generate(attempt, error)
                self._engine.cancel(attempt.id)
                self._engine.release(attempt.id)
                self._forget(attempt, was_ready=attempt.has_kv)

    def _quarantine(self, attempt: DecodeAttempt, error: str) -> None:
        """GRANTED -> QUARANTINED: out of its slots; the pages wait for `ReceiveFreed`."""
        failpoints.hit("decode.quarantined")
        spans.write_receive_failed(attempt, error)
        attempt.state, attempt.expires_s = DecodeState.QUARANTINED, math.inf
        attempt.quarantined_s = self._attempts.clock()
        self._engine.cancel(attempt.id)

    def _free(self, attempt: DecodeAttempt) -> None:
        """QUARANTINED -> FREE; an attempt in another state goes on."""
        if attempt.state is DecodeState.QUARANTINED:
            self._engine.release(attempt.id)
            self._forget(attempt)

    def _forget(self, attempt: DecodeAttempt, was_ready: bool = False) -> None:
        self._by_transfer.pop(attempt.transfer_id, None)
        self._attempts.end(attempt.id, was_ready)
        self._give_share_back(attempt)


def _answer_abort(stream: Outbox, attempt_id: bytes, *, already_ready: bool) -> None:
    aborted = worker_pb2.Aborted(attempt_id=attempt_id, already_ready=already_ready)
    stream.send(worker_pb2.WorkResponse(aborted=aborted))
