"""Settles a step: reads its tokens, finds ends, keys computed pages and emits events.

A row counts only if its slot still has its planned generation. A sequence that ended or was
cancelled meanwhile has left one more row in flight, whose token is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.bounds import Bounds
from engine.pages.blocks import BlockManager
from engine.pages.prefix import request_keys
from engine.schedule.batch import Batch
from engine.schedule.choosing import candidates_of
from engine.schedule.masking import Masking
from engine.schedule.recovery import Recovery
from engine.schedule.requests import Requests
from engine.schedule.sequences import ChunkPlan, RequestState, Sequence
from engine.schedule.slots import SlotState
from engine.speculation.stats import DraftStats
from engine.step.budget import StepBudget
from engine.step.plan import ScoreResult, StepPlan, StepResult
from engine.stopping import end_reason
from engine.tiers.protocol import PageTiers
from engine.types import (
    ChunkComputed,
    EndReason,
    FailureReason,
    Mode,
    NewTokens,
    Prefilled,
    PromptScored,
    TokenRecord,
)

Bools = NDArray[np.bool_]
Rows = NDArray[np.intp]


class Settler:
    """Applies the results of steps: to the batch's columns, to the requests and to the keys of
    pages."""

    def __init__(
        self,
        config: Bounds,
        blocks: BlockManager,
        batch: Batch,
        requests: Requests,
        budget: StepBudget,
        *,
        tiers: PageTiers,
        masking: Masking,
        recovery: Recovery,
        drafts: DraftStats | None,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._batch = batch
        self._requests = requests
        self._budget = budget
        self._tiers = tiers
        self._masking = masking
        self._recovery = recovery
        self._drafts = drafts
        self._step_ns = (0, 0)
        """Begin and end of the step that is settled."""

    def settle(
        self,
        plan: StepPlan,
        result: StepResult,
        hand_out: Callable[[], None] = lambda: None,
        step_ns: tuple[int, int] = (0, 0),
    ) -> None:
        """Applies the result of the oldest step in flight.

        Args:
            plan: the plan of the step.
            result: the result of the step.
            hand_out: called as soon as the chunks' events are queued, and again when all others
                are. So neither the sending of KV nor tokens wait for the rest of the work.
            step_ns: when the step was launched and when it began, to be reported with its tokens.
        """
        now_ns, self._step_ns = time.time_ns(), step_ns
        self._budget.succeeded()
        self._recovery.step_is_over(plan)
        alive = self._batch.alive(plan)
        self._batch.slots.count_in_flight(plan.sample_slots[alive], -1)
        self._land(plan, result, alive)
        self._fail_rows(plan, alive & ~result.finite)
        if result.spoilt is not None and result.spoilt.any():
            self._recovery.lose_states(plan, result.spoilt)
        self._fail_pooled(plan, result)
        if result.hook_failures:
            self._recovery.lose_hooks(plan, result.hook_failures)
        chunks = self._batch.live_chunks(plan.number)
        self._batch.chunks.pop(plan.number, None)
        for chunk in chunks:
            self._report_chunk(chunk, result, now_ns)
        hand_out()
        for chunk in chunks:
            self._keep_chunk(chunk)
        self._settle_tokens(plan, result, self._batch.alive(plan), now_ns)
        self._masking.note(plan, result)
        hand_out()
        self._let_pass(plan)
        self._requests.let_go()

    def _land(self, plan: StepPlan, result: StepResult, alive: Bools) -> None:
        """Moves the lengths of decode rows past the step."""
        slots = self._batch.slots
        if not slots.speculates:
            return
        rows = np.flatnonzero(alive[: plan.num_decodes])
        where = plan.sample_slots[rows].astype(np.intp)
        if result.counts is None:
            slots.land(where, 1)
            return
        if self._drafts is not None and result.drafted is not None:
            self._drafts.settled(plan, result, alive)
            slots.drafted[where] += result.drafted[rows]
            slots.accepted[where] += np.maximum(result.counts[rows] - 1, 0)
        least = slots.kv_low[where] + 1
        slots.land(where, result.counts[rows])
        self._take_back(plan, where, least)

    def _take_back(self, plan: StepPlan, where: Rows, least: NDArray[np.int32]) -> None:
        """The next step was planned as if it wrote from `least` on, and is in flight. The rows were
        longer: pages that lie before their lengths are not written any more."""
        slots, size = self._batch.slots, self._config.page_size
        first, end = least // size, slots.kv_low[where] // size
        for i in np.flatnonzero(end > first).tolist():
            pages = slots.page_table[where[i], first[i] : end[i]]
            self._blocks.mark_written(pages, plan.number)
            self._batch.others.take_back(int(where[i]), first[i], end[i], plan.number)

    def _let_pass(self, plan: StepPlan) -> None:
        """Lets pages go that no later step reads."""
        if not self._batch.others:
            return
        count = plan.num_decodes
        slots = plan.sample_slots[:count][self._batch.alive(plan)[:count]]
        self._batch.others.passed(slots, self._batch.slots.settled_kv(slots))

    def _fail_rows(self, plan: StepPlan, bad: Bools) -> None:
        for slot in set(plan.sample_slots[bad].tolist()):
            owner = self._batch.owners[slot]
            if owner is not None:
                self._requests.fail(owner.active, FailureReason.NUMERICAL)

    def _fail_pooled(self, plan: StepPlan, result: StepResult) -> None:
        """Fails prompts whose pooled states are no numbers."""
        if result.pooled is None:
            return
        finite: Bools = np.isfinite(result.pooled.sum(1))
        for chunk in self._batch.live_chunks(plan.number):
            if chunk.pool >= 0 and not finite[chunk.pool]:
                self._requests.fail(chunk.task.leader.active, FailureReason.NUMERICAL)

    # -- tokens ------------------------------------------------------------------------------------

    def _settle_tokens(self, plan: StepPlan, result: StepResult, alive: Bools, now_ns: int) -> None:
        """Settles the tokens of sequences in the batch. PREFILL requests have none there, because
        their chunks carry all events."""
        slots = self._batch.slots
        draws = np.flatnonzero(alive)
        if slots.num_chosen and (chosen := slots.is_chosen[plan.sample_slots[draws]]).any():
            for slot, candidates in candidates_of(plan, result, draws[chosen]):
                self._requests.hear(self._batch.owners[slot], candidates)
            draws = draws[~chosen]
        if draws.size == 0:
            return
        drawn = _Drawn.of(plan, result, draws, slots.output_len)
        ends = self._find_ends(drawn)
        if ends:
            drawn = drawn.until(ends)
        slots.outputs[drawn.slots, drawn.indices] = drawn.tokens
        slots.output_len[drawn.slots] = drawn.indices + 1  # The last of a draw's tokens stays.
        self._report_tokens(result, drawn, now_ns)
        for draw, (_, reason) in ends.items():
            self._requests.end(self._batch.owner(int(plan.sample_slots[draw])), reason)
        goes_on = ~np.isin(drawn.draws, np.fromiter(ends, np.intp)) if ends else slice(None)
        self._masking.consume(drawn.slots[goes_on], drawn.tokens[goes_on])
        where = plan.sample_slots[draws]
        preempting = where[slots.state[where] == SlotState.PREEMPTING]
        for slot in preempting[slots.in_flight[preempting] == 0].tolist():
            self._requests.finish_preemption(self._batch.owner(slot))

    def _find_ends(self, drawn: _Drawn) -> dict[int, tuple[int, EndReason]]:
        """The first token of each draw that ends its sequence: by draw, the token's place in
        `drawn` and the reason."""
        slots = self._batch.slots
        may_end = (slots.stop_ids[drawn.slots] == drawn.tokens[:, None]).any(1)
        may_end |= slots.prompt_len[drawn.slots] + drawn.indices + 1 >= slots.limit_len[drawn.slots]
        ends: dict[int, tuple[int, EndReason]] = {}
        for place in np.flatnonzero(may_end).tolist():
            if (draw := int(drawn.draws[place])) in ends:
                continue
            owner = self._batch.owner(int(drawn.slots[place]))
            token, index = int(drawn.tokens[place]), int(drawn.indices[place])
            if (reason := self._end_reason(owner, token, index)) is not None:
                ends[draw] = place, reason
        return ends

    def _end_reason(self, owner: Sequence, token: int, index: int) -> EndReason | None:
        """The reason for which a sequence ends with a token that may end it."""
        return end_reason(token, index, owner.active.request.stop, self._config.eos_token_ids)

    def _report_tokens(self, result: StepResult, drawn: _Drawn, now_ns: int) -> None:
        """Emits one event for each sink that has sequences among those that have drawn."""
        slots = self._batch.slots
        places = np.arange(drawn.slots.size)
        while places.size:
            sinks = slots.sink[drawn.slots[places]]
            mine = np.asarray(sinks == sinks[0], np.bool_)
            reported, places = drawn.youngest_first(places[mine]), places[~mine]
            where = drawn.slots[reported]
            event = NewTokens(
                request_ids=slots.request_id[where].tolist(),
                choices=slots.choice[where],
                indices=drawn.indices[reported],
                token_ids=drawn.tokens[reported],
                scored=self._scored(result, drawn, reported),
                at_ns=now_ns,
                step_ns=self._step_ns,
            )
            self._requests.emit(sinks[0], event)

    def _scored(self, result: StepResult, drawn: _Drawn, reported: Rows) -> dict[int, TokenRecord]:
        """Records by place in `reported`. Without log probabilities they cost nothing."""
        if result.logprobs is None:
            return {}
        column = drawn.indices[reported] - drawn.first[reported]
        columns = (drawn.slots[reported], drawn.draws[reported], column)
        places = zip(*(values.tolist() for values in columns), strict=True)
        records = (
            _token_record(self._batch.owner(slot), result, draw, column)
            for slot, draw, column in places
        )
        return {i: record for i, record in enumerate(records) if record.logprob is not None}

    # -- chunks ------------------------------------------------------------------------------------

    def _report_chunk(self, chunk: ChunkPlan, result: StepResult, now_ns: int) -> None:
        task, active = chunk.task, chunk.task.leader.active
        if chunk.score >= 0:
            task.scores.extend(_score_records(result.scores[chunk.score]))
        if chunk.is_last and task.scores:
            self._requests.emit(active.sink, PromptScored(active.request.id, tuple(task.scores)))
        if chunk.pool >= 0 and result.pooled is not None:
            task.states = task.states + result.pooled[chunk.pool]
        if chunk.is_last and active.request.mode is Mode.POOL:
            self._requests.emit(active.sink, task.pooled(now_ns))
        if active.request.mode is not Mode.PREFILL or active.state is not RequestState.ACTIVE:
            return
        slot = task.leader.slot
        pages, others = self._batch.slots.pages(slot), self._batch.others.pages(slot)
        event = ChunkComputed(active.request.id, chunk.end, pages, now_ns, others)
        self._requests.emit(active.sink, event)
        if chunk.is_last:
            self._report_prefilled(chunk, result, now_ns)

    def _keep_chunk(self, chunk: ChunkPlan) -> None:
        """Keys the pages of a chunk. The pages of a whole PREFILL prompt are held for the
        transfer; a POOL prompt needs its own no more."""
        self._publish(chunk)
        active, slot = chunk.task.leader.active, chunk.task.leader.slot
        self._batch.others.passed(np.array([slot]), np.array([chunk.end], np.int32))
        if not chunk.is_last or active.state is not RequestState.ACTIVE:
            return
        if active.request.mode is Mode.PREFILL:
            self._requests.hold(active)
        elif active.request.mode is Mode.POOL:
            self._requests.drop(active)

    def _publish(self, chunk: ChunkPlan) -> None:
        """Keys the pages that are complete with this chunk."""
        config, task = self._config, chunk.task
        complete = chunk.end // config.page_size
        if not config.prefix_cache or complete <= task.published_pages:
            return
        active = task.leader.active
        task.keys = (
            request_keys(
                config,
                active.request,
                task.tokens[: complete * config.page_size],
                task.keys[:complete],
            )
            + task.keys[complete:]
        )
        first = task.published_pages
        pages = self._batch.slots.page_table[task.leader.slot, first:complete]
        self._blocks.publish(pages, task.keys[first:complete])
        self._batch.others.publish(self._batch.others.pages(task.leader.slot), task.keys[:complete])
        self._tiers.published(task.keys[:complete], first)
        task.published_pages = complete

    def _report_prefilled(self, chunk: ChunkPlan, result: StepResult, now_ns: int) -> None:
        """PREFILL: emits the first tokens."""
        leader = chunk.task.leader
        active = leader.active
        index = len(leader.outputs)
        records, ends = [], []
        for row in range(chunk.first_sample, chunk.first_sample + active.request.first_tokens):
            record = _token_record(leader, result, row)
            records.append(record)
            searched = active.request.beams is not None  # Its first token is not chosen yet.
            ends.append(None if searched else self._end_reason(leader, record.token_id, index))
        pages = self._batch.slots.pages(leader.slot)[None]
        lacking = self._blocks.arrivals.undrafted(pages, np.array([pages.shape[1]]))
        told = active.request.id, tuple(records), tuple(ends), now_ns, int(lacking[0])
        self._requests.emit(active.sink, Prefilled(*told))


class _Drawn(NamedTuple):
    """Tokens of a step that count, in columns of N. Those of a draw are neighbours, in order."""

    draws: Rows
    """Which of the step's draws."""
    slots: Rows
    indices: NDArray[np.int32]
    """Output index of the token."""
    first: NDArray[np.int32]
    """Output index of its draw's first token."""
    tokens: NDArray[np.int32]

    @classmethod
    def of(
        cls, plan: StepPlan, result: StepResult, draws: Rows, output_len: NDArray[np.int32]
    ) -> _Drawn:
        """The tokens of these draws, whose slots have so many tokens before."""
        if result.counts is None:
            slots = plan.sample_slots[draws].astype(np.intp)
            indices = output_len[slots]
            return cls(draws, slots, indices, indices, result.tokens[draws])
        counts = result.counts[draws]
        before = np.repeat(np.cumsum(counts) - counts, counts)
        draws = np.repeat(draws, counts)
        columns = np.arange(draws.size) - before
        slots = plan.sample_slots[draws].astype(np.intp)
        first = output_len[slots]
        indices = (first + columns).astype(np.int32)
        tokens = result.tokens.reshape(len(plan.sample_slots), -1)[draws, columns]
        return cls(draws, slots, indices, first, tokens)

    def until(self, ends: Mapping[int, tuple[int, EndReason]]) -> _Drawn:
        """Without what was drawn behind the token that ends a draw's sequence."""
        last = np.full(int(self.draws[-1]) + 1, self.draws.size)
        for draw, (place, _) in ends.items():
            last[draw] = place
        kept = np.arange(self.draws.size) <= last[self.draws]
        draws, slots, indices, first, tokens = self
        return _Drawn(draws[kept], slots[kept], indices[kept], first[kept], tokens[kept])

    def youngest_first(self, places: Rows) -> Rows:
        """Some of the tokens, in another order. Sequences that just joined come first, because they
        have waited longest for a token and it takes some milliseconds to pass on a step's tokens.
        The others keep their order."""
        return places[np.argsort(self.first[places], kind="stable")]


def _token_record(owner: Sequence, result: StepResult, draw: int, column: int = 0) -> TokenRecord:
    """A token, with its log probabilities if the request wants them."""
    at = (draw, column) if result.tokens.ndim > 1 else draw
    token, top_n = int(result.tokens[at]), owner.active.request.sampling.top_logprobs
    if top_n is None or result.logprobs is None:
        return TokenRecord(token)
    logprob = float(result.logprobs[at])
    if top_n == 0 or result.top_ids is None or result.top_logprobs is None:
        return TokenRecord(token, logprob)
    best = tuple(result.top_ids[at][:top_n].tolist())
    return TokenRecord(token, logprob, best, tuple(result.top_logprobs[at][:top_n].tolist()))


def _score_records(score: ScoreResult) -> list[TokenRecord]:
    columns = (score.token_ids, score.logprobs, score.top_ids, score.top_logprobs)
    return [
        TokenRecord(token, logprob, tuple(best), tuple(best_logprobs))
        for token, logprob, best, best_logprobs in zip(*(c.tolist() for c in columns), strict=True)
    ]
