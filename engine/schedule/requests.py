"""Requests and their states, from submission to release.

A request's life:

    WAITING -> (slots and pages) -> ACTIVE [prefilling -> running] -> ended
    WAITING -> LOADING -> WAITING -> ...           (pages come from a lower tier or a peer)
    WAITING -> RESERVED -> deliver -> ACTIVE -> ended              (RECEIVE)
    WAITING -> ACTIVE -> ended                                     (RECEIVE, taken over)
    WAITING -> ACTIVE -> HELD -> release -> gone                   (PREFILL)
    WAITING -> ACTIVE -> pooled                                    (POOL)
    RESERVED -> cancel -> HELD -> release -> gone                  (quarantine)

If a running sequence finds no page, the youngest sequence is preempted. Its pages are freed. It
waits before all new requests, oldest first, to compute prompt and output again.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.adapters.registry import Adapters
from engine.adapters.types import Adapter
from engine.beams.chooser import Candidates, Hypothesis
from engine.beams.results import events_of
from engine.beams.search import with_candidates
from engine.bounds import Bounds
from engine.groups.others import AllKept
from engine.hooks.requests import RequestHooks, ask_hooks
from engine.masks.matchers import TokenMatcher
from engine.pages.blocks import BlockManager
from engine.pages.prefix import request_keys
from engine.schedule.batch import Batch
from engine.schedule.choosing import Choosing
from engine.schedule.sequences import (
    NO_IDS,
    ActiveRequest,
    PrefillTask,
    RequestState,
    Sequence,
)
from engine.schedule.slots import SlotState
from engine.stopping import end_reason
from engine.tiers.protocol import PageTiers, Wait
from engine.types import (
    EndReason,
    Event,
    FailureReason,
    Joined,
    Mode,
    PageIds,
    Request,
    RequestFailed,
    SequenceEnded,
    Sink,
    TokenIds,
    TokenRecord,
)


class Requests:
    """Owns the requests that the engine holds, and the events that were not sent to them yet."""

    def __init__(
        self,
        config: Bounds,
        blocks: BlockManager,
        batch: Batch,
        tiers: PageTiers,
        hooks: RequestHooks | None,
        adapters: Adapters,
    ) -> None:
        self.by_id: dict[bytes, ActiveRequest] = {}
        self.waiting: list[ActiveRequest] = []
        """In order of arrival."""
        self.preempted: list[Sequence] = []
        """Sequences to be computed again."""
        self.preemptions = 0
        self.choosing = Choosing(config, batch)
        self._config = config
        self._blocks = blocks
        self._batch = batch
        self._tiers = tiers
        self._hooks = hooks
        self.adapters = adapters
        self._arrivals = 0
        self._events: list[tuple[Sink, Event]] = []
        self._delivered: list[tuple[Sequence, int, int]] = []
        """Leaders whose prompts' pages are not keyed yet, with their slots and generations."""
        self._ended: list[tuple[ActiveRequest, TokenIds, PageIds, AllKept]] = []
        """For each ended sequence: its outputs with known KV, and its pages, which are still
        held."""

    # -- intake ---------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        sink: Sink,
        keys: Iterable[bytes] = (),
        matchers: Future[list[TokenMatcher]] | None = None,
        adapter: Future[Adapter] | None = None,
    ) -> None:
        """Accepts a request. `keys` are the known leading keys of its prompt. A request whose
        tokens are restricted waits for its `matchers`, and one with an adapter for its content,
        which it holds already."""
        request = with_candidates(request, self._config.eos_token_ids)
        active = ActiveRequest(request, sink, self._arrivals, keys=list(keys), matchers=matchers)
        active.held_adapter = adapter
        self._arrivals += 1
        if request.id in self.by_id:
            self._refuse(active, RequestFailed(request.id, FailureReason.INTERNAL))
        elif not self._can_ever_hold(request):
            self._refuse(active, RequestFailed(request.id, FailureReason.TOO_LARGE))
        elif request.beams is not None and request.mode.decodes and self._config.pp > 1:
            self._refuse(active, RequestFailed(request.id, FailureReason.BEAMS))
        elif request.adapter and adapter is None:
            self._refuse(active, RequestFailed(request.id, FailureReason.ADAPTER))
        elif (refusal := ask_hooks(self._hooks, active.hooked)) is not None:
            self._refuse(active, refusal)  # Last: hooks that hear of a beginning await an end.
        else:
            self.by_id[request.id] = active
            self.waiting.append(active)

    def _refuse(self, active: ActiveRequest, refusal: RequestFailed) -> None:
        self._let_adapter_go(active)
        self.emit(active.sink, refusal)

    def _let_adapter_go(self, active: ActiveRequest) -> None:
        if active.held_adapter is not None:
            self.adapters.release(active.request.adapter, active.held_adapter)
            active.held_adapter = None

    def _can_ever_hold(self, request: Request) -> bool:
        """Whether an empty batch could take a request to its end."""
        sequences, pages = self._config.extent_of(request)
        return self._config.can_ever_hold(
            request, self._blocks.total
        ) and self._batch.others.can_ever_hold(sequences, pages)

    def deliver(
        self, request_id: bytes, records: Seq[TokenRecord], drafted_from: int | None = None
    ) -> None:
        """RECEIVE: the KV of the prompt is in its pages. From page `drafted_from` on it has what
        a draft head keeps; None: nowhere. `records` are the choices' next tokens."""
        active = self.by_id.get(request_id)
        if active is None or active.state is not RequestState.RESERVED:
            return
        active.state = RequestState.ACTIVE
        leader = active.sequences[0]
        came = self._batch.slots.pages(leader.slot)[(held := active.reserved_from) :]
        lacking = came if drafted_from is None else came[: max(0, drafted_from - held)]
        self._blocks.arrivals.note(came, undrafted=lacking)
        self._batch.slots.set_kv(leader.slot, len(leader.tokens))
        if self._config.prefix_cache:
            generation = int(self._batch.slots.generation[leader.slot])
            self._delivered.append((leader, leader.slot, generation))
        self._batch.fork(active.sequences)
        self.join(active)
        if active.request.beams is not None:
            found = self.choosing.begin(active, Candidates.of(records[0]))
            self._searched(active, found)
            return
        for sequence, record in zip(list(active.sequences), records, strict=True):
            self._accept_delivered(sequence, record)

    def publish_delivered(self) -> None:
        """Keys the pages of delivered prompts, after the tokens of the step in flight were sent. At
        the delivery itself it would delay the launch of the step that the sequence joins, by half a
        millisecond for 8,000 tokens."""
        delivered, self._delivered = self._delivered, []
        for sequence, slot, generation in delivered:
            if self._batch.slots.generation[slot] == generation:
                others = self._batch.others.pages(slot)
                pages = self._batch.slots.pages(slot)
                self.publish(sequence.active, sequence.tokens, pages, others)

    def _accept_delivered(self, sequence: Sequence, record: TokenRecord) -> None:
        slot, index = sequence.slot, len(sequence.outputs)
        self._batch.slots.outputs[slot, index] = record.token_id
        self._batch.slots.output_len[slot] = index + 1
        stop = sequence.active.request.stop
        reason = end_reason(record.token_id, index, stop, self._config.eos_token_ids)
        if reason is None:
            self._batch.write(sequence, record.token_id)
            if sequence.matcher is not None:
                sequence.matcher.consume([record.token_id])
        else:
            self.end(sequence, reason)
            self.let_go()

    def end_if_unprepared(self, request_id: bytes) -> None:
        """What a request waited for is made; or cannot be, and the request fails."""
        active = self.by_id.get(request_id)
        reason = None if active is None else active.lacks
        if active is not None and reason is not None:
            self.cancel(request_id)
            self.emit(active.sink, RequestFailed(request_id, reason))

    def cancel(self, request_id: bytes) -> None:
        """Ends a request at any point. Pages that a transfer may use wait for `release`."""
        active = self.by_id.get(request_id)
        if active is None or active.state is RequestState.HELD:
            return
        if active.state in (RequestState.WAITING, RequestState.LOADING):
            self.waiting.remove(active)
            self._forget(active)
        elif active.state is RequestState.RESERVED or active.request.mode is Mode.PREFILL:
            self.hold(active)
        else:
            self.drop(active)

    def release(self, request_id: bytes) -> None:
        """Frees the pages of this request, since no transfer uses them any more."""
        active = self.by_id.get(request_id)
        if active is not None and active.state is RequestState.HELD:
            self._blocks.release(active.held_pages)
            self._batch.others.release_kept(active.other_held)
            self._forget(active)

    def hold(self, active: ActiveRequest) -> None:
        """Takes a request out of its slots and keeps its pages until `release`."""
        self._release_spares(active)
        slot = active.sequences[0].slot
        active.held_pages = self._batch.slots.pages(slot)
        active.other_held = self._batch.others.take(slot)
        self._batch.others.keep(active.other_held)
        for sequence in active.sequences:
            self._batch.leave(sequence)
        active.sequences.clear()
        self._batch.give_adapter_back(active)
        active.state = RequestState.HELD

    def drop(self, active: ActiveRequest) -> None:
        """Frees everything that a request holds and forgets it."""
        self._empty(active)
        self._forget(active)

    def _empty(self, active: ActiveRequest) -> None:
        """Frees everything that a request holds."""
        self._release_spares(active)
        self.preempted = [s for s in self.preempted if s.active is not active]
        for sequence in active.sequences:
            if sequence.slot >= 0:
                self._blocks.release(self._batch.slots.pages(sequence.slot))
                self._batch.others.release(self._batch.others.take(sequence.slot))
                self._batch.leave(sequence)
        active.sequences.clear()

    def _release_spares(self, active: ActiveRequest) -> None:
        self._blocks.release(active.spare_pages)
        self._batch.others.release_spares(active.other_spares)
        active.spare_pages, active.other_spares = NO_IDS, ()

    def _forget(self, active: ActiveRequest) -> None:
        del self.by_id[active.request.id]
        self._batch.give_adapter_back(active)
        self._let_adapter_go(active)
        if self._hooks is not None:
            self._hooks.ended(active.hooked, self._batch.next_step - 1)

    def fail(self, active: ActiveRequest, reason: FailureReason, hook: str = "") -> None:
        """Gives a request up and reports that to its sink. Pages that a transfer may read wait for
        `release`."""
        if active.request.mode is Mode.PREFILL and active.state is RequestState.ACTIVE:
            self.hold(active)
        else:
            self.drop(active)
        self.emit(active.sink, RequestFailed(active.request.id, reason, hook))

    def abandon(self) -> None:
        """Ends all requests as failed, and forgets them. No step will run any more, and
        what one left behind may not be right: no page is given back."""
        for active in self.by_id.values():
            self.emit(active.sink, RequestFailed(active.request.id, FailureReason.INTERNAL))
        self.by_id.clear()
        self.waiting.clear()

    # -- joining and ending ---------------------------------------------------------------------

    def join(self, active: ActiveRequest) -> None:
        """Reports to the sink once that the request's sequences are in the batch."""
        if not active.joined and active.request.mode.decodes:
            active.joined = True
            self.emit(active.sink, Joined(active.request.id, time.time_ns()))

    def end(self, sequence: Sequence, reason: EndReason) -> None:
        """Ends a sequence that ended by itself. Its pages are held until `let_go`, because freeing
        those of 8,000 tokens takes half a millisecond and would delay the batch's tokens."""
        active, slot = sequence.active, sequence.slot
        outputs = self._batch.slots.output_ids(slot)
        # The last token's KV was never needed, and a step in flight may still write it.
        pages, others = self._batch.slots.pages(slot), self._batch.others.take(slot)
        self._ended.append((active, outputs[:-1], pages, others))
        self._batch.leave(sequence)
        active.sequences.remove(sequence)
        last = not active.sequences
        self.emit(
            active.sink,
            SequenceEnded(
                active.request.id,
                sequence.choice,
                reason,
                len(outputs),
                last,
                sequence.preemptions,
                time.time_ns(),
                sequence.drafted,
                sequence.accepted,
            ),
        )
        if last:
            self._forget(active)

    # -- chosen sequences -----------------------------------------------------------------------

    def hear(self, sequence: Sequence | None, candidates: Candidates) -> None:
        """Gives the chooser of a sequence, if it is still in its slot, what it may draw. The end of
        a search is reported with all that it found."""
        if sequence is not None:
            self._searched(sequence.active, self.choosing.hear(sequence, candidates))

    def _searched(self, active: ActiveRequest, found: list[Hypothesis] | None) -> None:
        if found is None:
            return
        if not found:  # A message that was too long for candidates came without any.
            self.fail(active, FailureReason.INTERNAL)
            return
        now_ns = time.time_ns()
        for event in events_of(active.request.id, found, active.restarts, now_ns):
            self.emit(active.sink, event)
        self.drop(active)

    def _restart(self, active: ActiveRequest) -> None:
        """A search is preempted: its beams let everything go, and it begins again here, with its
        prompt. Beams that were computed one by one would share no pages."""
        self._empty(active)
        active.request = replace(active.request, mode=Mode.WHOLE)
        active.state, active.wait = RequestState.WAITING, None
        active.chooser, active.scores, active.heard = None, None, {}
        active.restarts += 1
        self.preemptions += 1
        insort(self.waiting, active, key=lambda one: one.seniority)

    def let_go(self) -> None:
        """Frees the pages of ended sequences. Full pages are keyed for the next turn of a
        conversation."""
        ended, self._ended = self._ended, []
        for active, outputs, pages, others in ended:
            if self._config.prefix_cache:
                tokens = np.concatenate([active.request.prompt_ids, outputs])
                self.publish(active, tokens[: active.hooked.exact_tokens], pages, others)
            self._blocks.release(pages)
            self._batch.others.release(others)

    def publish(
        self, active: ActiveRequest, tokens: TokenIds, pages: PageIds, others: AllKept
    ) -> None:
        """Keys the complete pages of `tokens`, which begin a sequence."""
        keys = request_keys(self._config, active.request, tokens, active.keys)
        self._blocks.publish(pages[: len(keys)], keys)
        self._batch.others.publish(others, keys)
        self._tiers.published(keys, 0)

    # -- preemption -----------------------------------------------------------------------------

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence out of the batch, now or when the steps in flight have returned its
        tokens."""
        slots = self._batch.slots
        if sequence.active.request.beams is not None:
            self._restart(sequence.active)
        elif slots.state[sequence.slot] == SlotState.PREFILLING:
            tasks = [t for t in self._batch.prefills if t.leader is sequence]
            self._release_spares(sequence.active)
            # One that pools has no task any more once its last chunk is launched.
            for member in tasks[0].sequences if tasks else [sequence]:
                self.finish_preemption(member)
        elif slots.in_flight[sequence.slot] == 0:
            self.finish_preemption(sequence)
        else:
            slots.state[sequence.slot] = SlotState.PREEMPTING

    def finish_preemption(self, sequence: Sequence, *, computed: bool = True) -> None:
        """Frees the pages of a preempted sequence, since the host knows all its tokens now.

        With tiers below the pool, the pages of what is computed are keyed and saved before others
        get them (swap). They are found again by their keys. Without, all is computed again.

        Args:
            sequence: the sequence, which has a slot.
            computed: whether the KV of all its tokens but the last is known to be there, if its
                prompt is computed at all.
        """
        if sequence.active.request.beams is not None:
            self._restart(sequence.active)
            return
        slots, slot = self._batch.slots, sequence.slot
        sequence.append(slots.output_ids(slot)[len(sequence.outputs) :])
        sequence.wait = None
        pages, others = slots.pages(slot), self._batch.others.take(slot)
        if self._tiers.on:
            if computed and slots.state[slot] != SlotState.PREFILLING:
                stored = sequence.tokens[:-1][: sequence.active.hooked.exact_tokens]
                self.publish(sequence.active, stored, pages, others)
            self._tiers.preempted(pages)
        self._blocks.release(pages)
        self._batch.others.release(others)
        self._batch.leave(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.preempted.append(sequence)

    def compute_again(self, task: PrefillTask) -> None:
        """Nothing that was computed of a prompt counts, and nothing of it was sent. It waits for
        nothing: what was wrong may still be in a tier, which would bring it again."""
        self._release_spares(task.leader.active)
        for sequence in task.sequences:
            if sequence.slot >= 0:
                self.finish_preemption(sequence, computed=False)
                sequence.wait = Wait()
        task.leader.active.wait = Wait()  # Beams begin again as a request.

    # -- reporting ------------------------------------------------------------------------------

    def emit(self, sink: Sink, event: Event) -> None:
        """Queues an event."""
        self._events.append((sink, event))

    def take_events(self) -> list[tuple[Sink, Event]]:
        """Events queued since the last call."""
        events, self._events = self._events, []
        return events

    def add_holders(self, holders: NDArray[np.int32]) -> None:
        """Adds who holds each page. Raises AssertionError if slots and requests disagree."""
        used = 0
        assert not self._ended, "pages of an ended sequence are still held"
        for active in self.by_id.values():
            np.add.at(holders, active.held_pages, 1)
            np.add.at(holders, active.spare_pages, 1)
            for sequence in active.sequences:
                if sequence.slot >= 0:
                    used += 1
                    assert self._batch.owners[sequence.slot] is sequence, "slot has another owner"
                    np.add.at(holders, self._batch.slots.pages(sequence.slot), 1)
                else:
                    assert sequence in self.preempted, "sequence neither in a slot nor preempted"
        assert used == self._batch.slots.num_used, "slot leaked"

    def add_other_holders(self, holders: NDArray[np.int32], number: int) -> None:
        """Adds who holds each page of a group beyond the first."""
        group = self._batch.others.groups[number - 1]
        for active in self.by_id.values():
            for kept in active.other_held[number - 1 : number]:
                np.add.at(holders, kept.pages, 1)
            for pages in active.other_spares[number - 1 : number]:
                np.add.at(holders, pages, 1)
            for sequence in active.sequences:
                if sequence.slot >= 0:
                    np.add.at(holders, group.pages(sequence.slot).pages, 1)
        np.add.at(holders, group.left_pages, 1)
