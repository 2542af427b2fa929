"""The scheduler: which requests are admitted, and what the next step does.

A request's life:

    WAITING -> (slots and pages) -> ACTIVE [prefilling -> running] -> ended
    WAITING -> RESERVED -> deliver -> ACTIVE -> ended              (RECEIVE)
    WAITING -> ACTIVE -> ended                                     (RECEIVE, taken over)
    WAITING -> ACTIVE -> HELD -> release -> gone                   (PREFILL)
    RESERVED -> cancel -> HELD -> release -> gone                  (quarantine)

A running sequence that finds no page is preempted, youngest first: its pages go back, and it
waits, before all new requests and oldest first, to compute prompt and output again.

This module keeps these states. `engine.bounds` says what can be held at all,
`engine.schedule.admission` who gets slots and pages, `engine.schedule.planning` what a step does,
and `engine.schedule.settling` reads what a step did; planning runs one step ahead of settling.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from engine.bounds import Bounds
from engine.pages.blocks import BlockManager
from engine.pages.prefix import page_keys
from engine.sampling import Sampler
from engine.schedule.policies import Fcfs, SchedulingPolicy
from engine.schedule.sequences import ActiveRequest, PrefillTask, RequestState, Sequence
from engine.schedule.slots import SlotState, SlotTable
from engine.stopping import end_ids, end_reason
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

NO_IDS = np.zeros(0, np.int32)


class Scheduler:
    """Owned by the step loop's thread; nothing here is thread-safe."""

    def __init__(
        self,
        config: Bounds,
        blocks: BlockManager,
        sampler: Sampler,
        policy: SchedulingPolicy | None = None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.sampler = sampler
        self.policy = policy or Fcfs()
        self.slots = SlotTable(
            config.max_sequences,
            -(-config.max_context_tokens // config.page_size),
            config.page_size,
        )
        self.owners: list[Sequence | None] = [None] * config.max_sequences
        """The sequence in each slot."""
        self.requests: dict[bytes, ActiveRequest] = {}
        self.waiting: list[ActiveRequest] = []
        self.preempted: list[Sequence] = []
        self.prefills: list[PrefillTask] = []
        """Tasks with tokens left to launch, in order of admission."""
        self.next_step = 0
        self.preemptions = 0
        self.step_tokens = config.max_step_tokens
        """Most new tokens in a step now: fewer after one that lacked memory."""
        self.failed_steps = 0
        """In a row; set by `engine.schedule.recovery`."""
        self.cached_tokens = 0
        self._arrivals = 0
        self._copies: dict[int, int] = {}
        """Target page -> source page, for the next step."""
        self._writes: dict[int, int] = {}
        """Slot -> token for the token table, for the next step."""
        self._outbox: list[tuple[Sink, Event]] = []
        self._delivered: list[tuple[Sequence, int, int]] = []
        """Leaders whose prompts' pages are not keyed yet, their slots and generations."""
        self._left: list[tuple[ActiveRequest, TokenIds, PageIds]] = []
        """Of sequences that ended: outputs whose KV is known, and pages that are still held."""

    # -- intake ---------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink, keys: Iterable[bytes] = ()) -> None:
        """A new request, of whose prompt these keys are known, from the first on."""
        active = ActiveRequest(request, sink, self._arrivals, keys=list(keys))
        self._arrivals += 1
        if request.id in self.requests:
            self.emit(active.sink, RequestFailed(request.id, FailureReason.INTERNAL))
        elif not self.config.can_ever_hold(request, self.blocks.total):
            self.emit(active.sink, RequestFailed(request.id, FailureReason.TOO_LARGE))
        else:
            self.requests[request.id] = active
            self.waiting.append(active)

    def deliver(self, request_id: bytes, records: Seq[TokenRecord]) -> None:
        """RECEIVE: the KV of the prompt is in its pages; `records` are the choices' next tokens."""
        active = self.requests.get(request_id)
        if active is None or active.state is not RequestState.RESERVED:
            return
        active.state = RequestState.ACTIVE
        leader = active.sequences[0]
        self.slots.kv_len[leader.slot] = len(leader.tokens())
        if self.config.prefix_cache:
            generation = int(self.slots.generation[leader.slot])
            self._delivered.append((leader, leader.slot, generation))
        self.fork(active.sequences)
        self.join(active)
        for sequence, record in zip(list(active.sequences), records, strict=True):
            self._accept_delivered(sequence, record)

    def publish_delivered(self) -> None:
        """Keys the pages of prompts that were delivered. Not at the delivery itself: the launch of
        the next step, which the sequence is to join, would be late by half a millisecond for
        8,000 tokens. Nor before the tokens of the step in flight are told."""
        delivered, self._delivered = self._delivered, []
        for sequence, slot, generation in delivered:
            if self.slots.generation[slot] == generation:
                self._publish(sequence.active, sequence.tokens(), self.slots.pages(slot))

    def _accept_delivered(self, sequence: Sequence, record: TokenRecord) -> None:
        slot, index = sequence.slot, len(sequence.outputs)
        self.slots.outputs[slot, index] = record.token_id
        self.slots.output_len[slot] = index + 1
        stop = sequence.active.request.stop
        reason = end_reason(record.token_id, index, stop, self.config.eos_token_ids, context_room=1)
        if reason is None:
            self._assign_sampler(sequence)
            self._writes[slot] = record.token_id
        else:
            self.end(sequence, reason)
            self.let_go()

    def cancel(self, request_id: bytes) -> None:
        """Ends a request at any point. Pages that others may write or read wait for release."""
        active = self.requests.get(request_id)
        if active is None or active.state is RequestState.HELD:
            return
        if active.state is RequestState.WAITING:
            self.waiting.remove(active)
            del self.requests[request_id]
        elif active.state is RequestState.RESERVED or active.request.mode is Mode.PREFILL:
            self.hold(active)
        else:
            self.drop(active)

    def release(self, request_id: bytes) -> None:
        """Nothing outside touches the pages of this request any more."""
        active = self.requests.get(request_id)
        if active is not None and active.state is RequestState.HELD:
            self.blocks.release(active.held_pages)
            del self.requests[request_id]

    def hold(self, active: ActiveRequest) -> None:
        """Takes a request out of its slots and keeps its pages until `release`."""
        self.blocks.release(active.spare_pages)
        active.spare_pages = NO_IDS
        active.held_pages = self.slots.pages(active.sequences[0].slot)
        for sequence in active.sequences:
            self._leave_slot(sequence)
        active.sequences.clear()
        active.state = RequestState.HELD

    def drop(self, active: ActiveRequest) -> None:
        """Frees all that a request holds and forgets it."""
        self.blocks.release(active.spare_pages)
        self.preempted = [s for s in self.preempted if s.active is not active]
        for sequence in active.sequences:
            if sequence.slot >= 0:
                self.blocks.release(self.slots.pages(sequence.slot))
                self._leave_slot(sequence)
        active.sequences.clear()
        del self.requests[active.request.id]

    def fail(self, active: ActiveRequest, reason: FailureReason) -> None:
        """Gives a request up, and says so. Pages that others may read wait for release."""
        if active.request.mode is Mode.PREFILL and active.state is RequestState.ACTIVE:
            self.hold(active)
        else:
            self.drop(active)
        self.emit(active.sink, RequestFailed(active.request.id, reason))

    # -- slots ----------------------------------------------------------------------------------

    def enter_slot(self, sequence: Sequence, state: SlotState) -> None:
        """Gives a sequence a slot; its pages are the caller's to set."""
        active = sequence.active
        request = active.request
        slot = self.slots.take(
            state, len(request.prompt_ids), sequence.outputs, request.stop, active.seniority
        )
        if request.mode is Mode.PREFILL:
            self.slots.limit_len[slot] = len(request.prompt_ids)
        self.slots.choice[slot] = sequence.choice
        self.slots.noise_choice[slot] = sequence.noise_choice
        self.slots.request_id[slot], self.slots.sink[slot] = request.id, active.sink
        self.slots.set_stop_ids(slot, sorted(end_ids(request.stop, self.config.eos_token_ids)))
        sequence.slot = slot
        self.owners[slot] = sequence
        self._assign_sampler(sequence)

    def _assign_sampler(self, sequence: Sequence) -> None:
        request, slot = sequence.active.request, sequence.slot
        self.sampler.assign(
            slot,
            request.sampling,
            request.stop,
            sequence.noise_choice,
            request.prompt_ids,
            self.slots.output_ids(slot),
        )

    def _leave_slot(self, sequence: Sequence) -> None:
        """The sequence's pages have been taken care of."""
        slot = sequence.slot
        self.slots.give_back(slot)
        self.owners[slot] = None
        self._writes.pop(slot, None)
        sequence.slot = -1
        if self.prefills:
            self.prefills = [t for t in self.prefills if t.leader is not sequence]

    def runs(self, task: PrefillTask) -> bool:
        """Whether its leader is in the slot that the task is for, and was not taken out since."""
        in_slot = task.leader.slot == task.slot
        return in_slot and int(self.slots.generation[task.slot]) == task.generation

    # -- joining and ending ---------------------------------------------------------------------

    def join(self, active: ActiveRequest) -> None:
        """Tells once that the request's sequences are in the batch."""
        if not active.joined and active.request.mode is not Mode.PREFILL:
            active.joined = True
            self.emit(active.sink, Joined(active.request.id, time.time_ns()))

    def fork(self, sequences: list[Sequence]) -> None:
        """The leader's KV is computed, or will be by the step just planned: every sequence runs
        from it. Full pages are shared, the partial one is copied before the next step."""
        leader, *followers = sequences
        active = leader.active
        self.slots.state[leader.slot] = SlotState.RUNNING
        pages = self.slots.pages(leader.slot)
        length = int(self.slots.kv_len[leader.slot])
        partial = length % self.config.page_size != 0
        for i, follower in enumerate(followers):
            own = pages.copy()
            if partial:
                own[-1] = active.spare_pages[i]
                self._copies[int(own[-1])] = int(pages[-1])
            self.blocks.share(pages[: len(pages) - partial])
            self.slots.set_pages(follower.slot, own)
            self.slots.kv_len[follower.slot] = length
            self.slots.state[follower.slot] = SlotState.RUNNING
        if followers and partial:
            # The page copied from counts as well: its sequence may end before that step has run,
            # and it must not be anybody else's until then.
            self.blocks.mark_written(np.append(active.spare_pages, pages[-1:]), self.next_step)
            active.spare_pages = NO_IDS

    def end(self, sequence: Sequence, reason: EndReason) -> None:
        """A sequence ended by itself. Its pages are held until `let_go`: to give back those of
        8,000 tokens takes half a millisecond, for which the batch's tokens are not to wait."""
        active, slot = sequence.active, sequence.slot
        outputs = self.slots.output_ids(slot)
        # The last token's KV was never needed, and a step in flight may still write it.
        self._left.append((active, outputs[:-1], self.slots.pages(slot)))
        self._leave_slot(sequence)
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
            ),
        )
        if last:
            del self.requests[active.request.id]

    def let_go(self) -> None:
        """Gives back the pages of sequences that ended. Those that they filled are keyed, for the
        next turn of a conversation."""
        left, self._left = self._left, []
        for active, outputs, pages in left:
            if self.config.prefix_cache:
                self._publish(active, np.concatenate([active.request.prompt_ids, outputs]), pages)
            self.blocks.release(pages)

    def _publish(self, active: ActiveRequest, tokens: TokenIds, pages: PageIds) -> None:
        """Keys the complete pages of `tokens`, which begin a sequence."""
        size = self.config.page_size
        complete = len(tokens) // size
        keys = page_keys(tokens[: complete * size], size, active.request.cache_salt, active.keys)
        self.blocks.publish(pages[:complete], keys)

    # -- preemption -----------------------------------------------------------------------------

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence out of the batch, to be computed again when there is room."""
        if self.slots.state[sequence.slot] == SlotState.PREFILLING:
            task = next(t for t in self.prefills if t.leader is sequence)
            self.blocks.release(sequence.active.spare_pages)
            sequence.active.spare_pages = NO_IDS
            for member in task.sequences:
                self.finish_preemption(member)
        elif self.slots.in_flight[sequence.slot] == 0:
            self.finish_preemption(sequence)
        else:
            self.slots.state[sequence.slot] = SlotState.PREEMPTING

    def finish_preemption(self, sequence: Sequence) -> None:
        """Every token of the sequence is known here: its pages go back."""
        sequence.outputs = self.slots.output_ids(sequence.slot)
        self.blocks.release(self.slots.pages(sequence.slot))
        self._leave_slot(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.preempted.append(sequence)

    def step_succeeded(self) -> None:
        """The device ran a step: the budget that a failed one had cut grows back bit by bit."""
        self.failed_steps = 0
        self.step_tokens = min(self.step_tokens + 1, self.config.max_step_tokens)

    # -- reporting ------------------------------------------------------------------------------

    def emit(self, sink: Sink, event: Event) -> None:
        """Queues an event."""
        self._outbox.append((sink, event))

    def take_events(self) -> list[tuple[Sink, Event]]:
        """Events queued since the last call."""
        events, self._outbox = self._outbox, []
        return events

    def take_transfers(self) -> tuple[dict[int, int], dict[int, int]]:
        """Page copies and token table writes that the next step must begin with."""
        queued = self._copies, self._writes
        self._copies, self._writes = {}, {}
        return queued

    @property
    def has_transfers(self) -> bool:
        """Whether a step is needed for copies or writes alone."""
        return bool(self._copies or self._writes)

    def check_invariants(self) -> None:
        """Raises AssertionError where pages, slots and requests disagree."""
        self.blocks.check_invariants()
        holders = np.zeros(self.blocks.num_pages, np.int32)
        used = 0
        assert not self._left, "pages of an ended sequence are still held"
        for active in self.requests.values():
            np.add.at(holders, active.held_pages, 1)
            np.add.at(holders, active.spare_pages, 1)
            for sequence in active.sequences:
                if sequence.slot >= 0:
                    used += 1
                    assert self.owners[sequence.slot] is sequence, "slot has another owner"
                    np.add.at(holders, self.slots.pages(sequence.slot), 1)
                else:
                    assert sequence in self.preempted, "sequence neither in a slot nor preempted"
        assert used == self.slots.num_used, "slot leaked"
        self.blocks.check_holders(holders)
