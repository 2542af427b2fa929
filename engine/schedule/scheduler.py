"""The scheduler: states of requests, from submission to release.

A request's life:

    WAITING -> (slots and pages) -> ACTIVE [prefilling -> running] -> ended
    WAITING -> LOADING -> WAITING -> ...           (pages come from a lower tier or a peer)
    WAITING -> RESERVED -> deliver -> ACTIVE -> ended              (RECEIVE)
    WAITING -> ACTIVE -> ended                                     (RECEIVE, taken over)
    WAITING -> ACTIVE -> HELD -> release -> gone                   (PREFILL)
    RESERVED -> cancel -> HELD -> release -> gone                  (quarantine)

If a running sequence finds no page, the youngest sequence is preempted. Its pages are freed. It
waits before all new requests, oldest first, to compute prompt and output again.

This module keeps these states. `engine.bounds` has the limits of a worker.
`engine.schedule.admission` gives slots and pages. `engine.schedule.planning` plans a step, and
`engine.schedule.settling` reads its results. Planning runs one step ahead of settling.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future

import numpy as np

from engine.bounds import Bounds
from engine.hooks.requests import RequestHooks, ask_hooks
from engine.masks.matchers import TokenMatcher
from engine.pages.blocks import BlockManager
from engine.pages.prefix import request_keys
from engine.schedule.policies import Fcfs, SchedulingPolicy
from engine.schedule.sequences import ActiveRequest, ChunkPlan, PrefillTask, RequestState, Sequence
from engine.schedule.slots import SlotState, SlotTable
from engine.step.sampling import SamplePlanner
from engine.stopping import end_ids, end_reason
from engine.tiers.peers import Fetches
from engine.tiers.protocol import NoTiers, PageTiers
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
    """Keeps requests and their states. Only the step loop's thread may use it."""

    def __init__(
        self,
        config: Bounds,
        blocks: BlockManager,
        sampler: SamplePlanner,
        policy: SchedulingPolicy | None = None,
        tiers: PageTiers | None = None,
        hooks: RequestHooks | None = None,
    ) -> None:
        self.config = config
        self.blocks = blocks
        self.sampler = sampler
        self.policy = policy or Fcfs()
        self.tiers = tiers or NoTiers()
        self.hooks = hooks
        self.fetches = Fetches(blocks, self.tiers)
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
        self.chunks: dict[int, tuple[ChunkPlan, ...]] = {}
        """The prefill rows of steps in flight, by step number."""
        self.next_step = 0
        self.preemptions = 0
        self.step_tokens = config.max_step_tokens
        """Most new tokens in a step now. It is lower after a step that lacked memory."""
        self.failed_steps = 0
        """Number of failures in a row. `engine.schedule.recovery` sets it."""
        self.cached_tokens = 0
        self.loaded_tokens: Counter[str] = Counter()
        """Those of them that came from beyond the pool, by source."""
        self._arrivals = 0
        self._copies: dict[int, int] = {}
        """Target page -> source page, for the next step."""
        self._writes: dict[int, int] = {}
        """Slot -> token for the token table, for the next step."""
        self._outbox: list[tuple[Sink, Event]] = []
        self._delivered: list[tuple[Sequence, int, int]] = []
        """Leaders whose prompts' pages are not keyed yet, with their slots and generations."""
        self._left: list[tuple[ActiveRequest, TokenIds, PageIds]] = []
        """For each ended sequence: its outputs with known KV, and its pages, which are still
        held."""

    # -- intake ---------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        sink: Sink,
        keys: Iterable[bytes] = (),
        matchers: Future[list[TokenMatcher]] | None = None,
    ) -> None:
        """Accepts a request. `keys` are the known leading keys of its prompt. A request whose
        tokens are restricted waits for its `matchers`."""
        active = ActiveRequest(request, sink, self._arrivals, keys=list(keys), matchers=matchers)
        self._arrivals += 1
        if request.id in self.requests:
            self.emit(active.sink, RequestFailed(request.id, FailureReason.INTERNAL))
        elif not self.config.can_ever_hold(request, self.blocks.total):
            self.emit(active.sink, RequestFailed(request.id, FailureReason.TOO_LARGE))
        elif (refusal := ask_hooks(self.hooks, active.hooked)) is not None:
            self.emit(active.sink, refusal)
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
        self.blocks.arrivals.note(self.slots.pages(leader.slot))
        self.slots.kv_len[leader.slot] = len(leader.tokens())
        if self.config.prefix_cache:
            generation = int(self.slots.generation[leader.slot])
            self._delivered.append((leader, leader.slot, generation))
        self.fork(active.sequences)
        self.join(active)
        for sequence, record in zip(list(active.sequences), records, strict=True):
            self._accept_delivered(sequence, record)

    def publish_delivered(self) -> None:
        """Keys the pages of delivered prompts, after the tokens of the step in flight were sent. At
        the delivery itself it would delay the launch of the step that the sequence joins, by half a
        millisecond for 8,000 tokens."""
        delivered, self._delivered = self._delivered, []
        for sequence, slot, generation in delivered:
            if self.slots.generation[slot] == generation:
                self.publish(sequence.active, sequence.tokens(), self.slots.pages(slot))

    def _accept_delivered(self, sequence: Sequence, record: TokenRecord) -> None:
        slot, index = sequence.slot, len(sequence.outputs)
        self.slots.outputs[slot, index] = record.token_id
        self.slots.output_len[slot] = index + 1
        stop = sequence.active.request.stop
        reason = end_reason(record.token_id, index, stop, self.config.eos_token_ids, context_room=1)
        if reason is None:
            self._assign_sampler(sequence)
            self._writes[slot] = record.token_id
            if sequence.matcher is not None:
                sequence.matcher.consume([record.token_id])
        else:
            self.end(sequence, reason)
            self.let_go()

    def cancel(self, request_id: bytes) -> None:
        """Ends a request at any point. Pages that a transfer may use wait for `release`."""
        active = self.requests.get(request_id)
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
        active = self.requests.get(request_id)
        if active is not None and active.state is RequestState.HELD:
            self.blocks.release(active.held_pages)
            self._forget(active)

    def hold(self, active: ActiveRequest) -> None:
        """Takes a request out of its slots and keeps its pages until `release`."""
        self.blocks.release(active.spare_pages)
        active.spare_pages = NO_IDS
        active.held_pages = self.slots.pages(active.sequences[0].slot)
        for sequence in active.sequences:
            self.leave_slot(sequence)
        active.sequences.clear()
        active.state = RequestState.HELD

    def drop(self, active: ActiveRequest) -> None:
        """Frees everything that a request holds and forgets it."""
        self.blocks.release(active.spare_pages)
        self.preempted = [s for s in self.preempted if s.active is not active]
        for sequence in active.sequences:
            if sequence.slot >= 0:
                self.blocks.release(self.slots.pages(sequence.slot))
                self.leave_slot(sequence)
        active.sequences.clear()
        self._forget(active)

    def _forget(self, active: ActiveRequest) -> None:
        del self.requests[active.request.id]
        if self.hooks is not None:
            self.hooks.ended(active.hooked, self.next_step - 1)

    def fail(self, active: ActiveRequest, reason: FailureReason, hook: str = "") -> None:
        """Gives a request up and tells its sink. Pages that a transfer may read wait for
        `release`."""
        if active.request.mode is Mode.PREFILL and active.state is RequestState.ACTIVE:
            self.hold(active)
        else:
            self.drop(active)
        self.emit(active.sink, RequestFailed(active.request.id, reason, hook))

    # -- slots ----------------------------------------------------------------------------------

    def enter_slot(self, sequence: Sequence, state: SlotState) -> None:
        """Gives a sequence a slot. The caller must set its pages."""
        active = sequence.active
        request = active.request
        slot = self.slots.take(
            state, len(request.prompt_ids), sequence.outputs, request.stop, active.seniority
        )
        if request.mode is Mode.PREFILL:
            self.slots.set_limit(slot, len(request.prompt_ids))
        self.slots.choice[slot] = sequence.choice
        self.slots.noise_choice[slot] = sequence.noise_choice
        self.slots.request_id[slot], self.slots.sink[slot] = request.id, active.sink
        self.slots.set_stop_ids(slot, sorted(end_ids(request.stop, self.config.eos_token_ids)))
        self.slots.is_masked[slot] = sequence.matcher is not None
        sequence.slot = slot
        self.owners[slot] = sequence
        if self.hooks is not None:
            self.hooks.entered(slot, active.hooked)
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

    def leave_slot(self, sequence: Sequence) -> None:
        """Takes a sequence out of its slot. The caller has handled its pages."""
        slot = sequence.slot
        self.slots.give_back(slot)
        self.owners[slot] = None
        self._writes.pop(slot, None)
        sequence.slot = -1
        if self.prefills:
            self.prefills = [t for t in self.prefills if t.leader is not sequence]

    def runs(self, task: PrefillTask) -> bool:
        """Whether the task's leader has stayed in the task's slot."""
        in_slot = task.leader.slot == task.slot
        return in_slot and int(self.slots.generation[task.slot]) == task.generation

    # -- joining and ending ---------------------------------------------------------------------

    def join(self, active: ActiveRequest) -> None:
        """Tells the sink once that the request's sequences are in the batch."""
        if not active.joined and active.request.mode is not Mode.PREFILL:
            active.joined = True
            self.emit(active.sink, Joined(active.request.id, time.time_ns()))

    def fork(self, sequences: list[Sequence]) -> None:
        """Lets every sequence run from the leader's KV, which is computed or will be by the step
        just planned. Full pages are shared. The partial page is copied before the next step."""
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
            # The source page counts as well: its sequence may end before that step has run, and no
            # other sequence may get the page until then.
            self.blocks.mark_written(np.append(active.spare_pages, pages[-1:]), self.next_step)
            active.spare_pages = NO_IDS

    def end(self, sequence: Sequence, reason: EndReason) -> None:
        """Ends a sequence that ended by itself. Its pages are held until `let_go`, because freeing
        those of 8,000 tokens takes half a millisecond and would delay the batch's tokens."""
        active, slot = sequence.active, sequence.slot
        outputs = self.slots.output_ids(slot)
        # The last token's KV was never needed, and a step in flight may still write it.
        self._left.append((active, outputs[:-1], self.slots.pages(slot)))
        self.leave_slot(sequence)
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
            self._forget(active)

    def let_go(self) -> None:
        """Frees the pages of ended sequences. Full pages are keyed for the next turn of a
        conversation."""
        left, self._left = self._left, []
        for active, outputs, pages in left:
            if self.config.prefix_cache:
                tokens = np.concatenate([active.request.prompt_ids, outputs])
                self.publish(active, tokens[: active.hooked.exact_tokens], pages)
            self.blocks.release(pages)

    def publish(self, active: ActiveRequest, tokens: TokenIds, pages: PageIds) -> None:
        """Keys the complete pages of `tokens`, which begin a sequence."""
        keys = request_keys(self.config, active.request, tokens, active.keys)
        self.blocks.publish(pages[: len(keys)], keys)
        self.tiers.published(keys, 0)

    def step_succeeded(self) -> None:
        """The device ran a step. A budget that a failed step had cut grows by one token."""
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
        """Takes the page copies and token table writes with which the next step must begin."""
        queued = self._copies, self._writes
        self._copies, self._writes = {}, {}
        return queued

    @property
    def has_transfers(self) -> bool:
        """Whether copies or writes wait for a step."""
        return bool(self._copies or self._writes)

    def check_invariants(self) -> None:
        """Raises AssertionError if pages, slots and requests disagree."""
        self.blocks.check_invariants()
        holders = np.zeros(self.blocks.num_pages, np.int32)
        self.tiers.add_holders(holders)
        self.fetches.add_holders(holders)
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
