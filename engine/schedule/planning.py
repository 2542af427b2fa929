"""Plans the next step.

Planning runs one step ahead of the host's knowledge. When step N + 1 is planned, the tokens of step
N are only on the device. So positions and page needs are columns that move here, at planning. An
end of sequence is found when a step settles, one step late. A sequence that will reach `max_tokens`
is known before and not planned. With drafts (`engine.speculation`), the host knows a least and a
most of each length, and plans for the most. Through several stages, each of the steps in flight has
a part of the sequences, or prompts (`engine.step.lanes`).

Decode rows come first, `StepPlan.width` tokens each. The rest of the budget goes to prompts in
order of admission, in chunks of whole pages, and where layers keep states, of whole multiples that
these do not depend on. Several prompts share a step up to `full_step_tokens`: beyond that it takes
longer in proportion, and all would end with the last one. Beside decode rows, prompts get at most
`mixed_prefill_tokens`; these limits may change while the engine runs. If the engine gathers
contexts (`Bounds.gathers`), a step holds only prompts whose contexts fit the scratch together, with
those that begin in it: a graph treats all alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.bounds import UNBOUNDED, Bounds, PromptLimits
from engine.pages.blocks import BlockManager
from engine.pages.growth import grow_oldest
from engine.schedule.batch import Batch
from engine.schedule.requests import Requests
from engine.schedule.sequences import NO_IDS, ChunkPlan, PrefillTask, Sequence
from engine.schedule.slots import SlotState
from engine.speculation.widths import Widths
from engine.step.budget import StepBudget
from engine.step.lanes import Lanes
from engine.step.plan import NO_POOLS, Int32s, ScorePlan, StepPlan, StepResult
from engine.step.sampling import SamplePlan
from engine.tiers.protocol import PageTiers
from engine.types import SCRATCH_PAGE, Mode, PrefillStarted

Slots = NDArray[np.intp]


class _Samples(NamedTuple):
    """The tokens to draw, in columns."""

    tokens: Int32s
    slots: Int32s
    indices: Int32s
    choices: Int32s


Pool = tuple[int, int, int, int]  # A row of `StepPlan.pools`.


class Planner:
    """Plans steps, and moves the batch's columns and prompts past each of them."""

    def __init__(
        self,
        config: Bounds,
        blocks: BlockManager,
        batch: Batch,
        requests: Requests,
        budget: StepBudget,
        tiers: PageTiers,
        widths: Widths | None,
        lanes: Lanes,
    ) -> None:
        self._config = config
        self._lanes = lanes
        self._blocks = blocks
        self._batch = batch
        self._requests = requests
        self._budget = budget
        self._tiers = tiers
        self._widths = widths
        self._limits = config.prompt_limits

    def limit(self, limits: PromptLimits) -> None:
        """Limits the prompts of the plans that follow."""
        self._limits = limits

    def plan(self) -> StepPlan | None:
        """Plans the next step and moves the columns past it. None if there is no work."""
        rows = self._decode_rows()
        width = self._width(rows)
        chunks, scores, pools = self._cut_chunks(rows.size, rows.size * width)
        if not (rows.size or chunks or self._lanes.mixes):
            rows = self._decode_rows(early=True)
        if not (rows.size or chunks or (self._batch.has_transfers and not self._lanes.is_busy)):
            return None
        plan = self._build(rows, width, chunks, scores, pools)
        self._lanes.launched(plan)
        self._batch.next_step += 1
        if chunks:
            self._batch.chunks[plan.number] = tuple(chunks)
        slots = self._batch.slots
        slots.launch(rows, plan.context_lens[: rows.size], plan.width)
        slots.count_in_flight(plan.sample_slots, 1)
        for chunk in chunks:
            self._advance(chunk)
        return plan

    # -- decode rows -------------------------------------------------------------------------------

    def _decode_rows(self, *, early: bool = False) -> Slots:
        """Slots that decode in the next step, each with a page for the token it stores. `early`:
        nothing else can be launched."""
        slots, blocks, lanes = self._batch.slots, self._blocks, self._lanes
        rows = slots.running()
        rows = rows[slots.least_kv(rows) + 1 < slots.limit_len[rows]]
        if self._batch.prefills and lanes.prompts_are_due(rows.size) and not early:
            return rows[:0]
        given = slots.in_flight, slots.is_masked, self._batch.next_step
        rows = lanes.choose(rows, *given, early=early)
        least = slots.least_kv(rows)
        short = rows[least >= slots.page_count[rows] * slots.page_size]
        if short.size == 0:
            return self._with_other_pages(rows)
        if short.size > blocks.available:
            oldest_first = short[np.argsort(slots.seniority[short], kind="stable")]
            served = oldest_first[: blocks.available]
            self._make_room(short.size - blocks.available)
            rows = np.setdiff1d(rows, np.setdiff1d(short, served))
            rows = rows[slots.state[rows] == SlotState.RUNNING]
            short = np.intersect1d(served, rows)
        slots.page_table[short, slots.page_count[short]] = blocks.allocate_apart(short.size)
        slots.page_count[short] += 1
        return self._with_other_pages(rows)

    def _with_other_pages(self, rows: Slots) -> Slots:
        """The rows that have a page in every other group, too."""
        slots, others = self._batch.slots, self._batch.others
        if others:
            rows = others.grow(rows, slots.least_kv(rows), slots.seniority[rows])
        return self._requests.choosing.together(rows)

    def _width(self, rows: Slots) -> int:
        """Tokens of each decode row."""
        slots = self._batch.slots
        if self._widths is None or not slots.drafts[rows].any():
            return 1
        if self._batch.others.has_states:
            return 1  # A wrong draft cannot be taken back from one.
        if self._batch.hook_tags(rows.astype(np.int32)).any():
            return 1  # Hooks are given lengths.
        room = (self._budget.tokens - self._config.page_size) // rows.size
        return self._widths.choose(rows.size, room)

    def settled(self, plan: StepPlan, result: StepResult, step_s: float) -> None:
        """A step has settled, which took so many seconds."""
        if self._widths is not None:
            self._widths.settled(plan, result, step_s)

    def _bounds(self, rows: Slots, width: int) -> Int32s:
        """[R]: the first position that each decode row must not store in this step. Rows get pages
        for all that they may store, oldest first, as long as there are any: nobody is preempted
        for a draft."""
        slots, size, others = self._batch.slots, self._config.page_size, self._batch.others
        if self._widths is None:
            return slots.kv_len[rows] + 1
        drafts = slots.drafts[rows]
        most = np.minimum(
            slots.kv_len[rows] + np.where(drafts, width, 1), slots.limit_len[rows] - 1
        )
        ahead = np.where(drafts, self._config.ahead_tokens, 0)
        drafted = np.minimum(most + ahead, slots.limit_len[rows] - 1)
        missing = np.maximum(-(-drafted // size) - slots.page_count[rows], 0)
        seniority = slots.seniority[rows]
        if missing.any():
            grow_oldest(self._blocks, slots.page_table, slots.page_count, rows, missing, seniority)
        bounds: Int32s = np.minimum(most, slots.page_count[rows] * size).astype(np.int32)
        return others.grow_ahead(rows, bounds, seniority) if others else bounds

    def _make_room(self, missing: int) -> None:
        """Preempts the youngest sequences until `missing` more pages are free or about to be free.

        The oldest sequence is never preempted. It waits for the pages of the others, so one always
        reaches its end. Pages of a transfer in flight have no sequence in the batch.
        """
        slots = self._batch.slots
        leaving = np.flatnonzero(slots.state == SlotState.PREEMPTING)
        coming = self._blocks.settling + self._tiers.leaving_pages
        coming += int(slots.page_count[leaving].sum())
        candidates = self._preemptible()
        for sequence in reversed(candidates[1:]):
            if coming >= missing:
                return
            if sequence.slot < 0 or sequence.active.goes_with(candidates[0]):
                continue  # Beams are preempted together, and run together.
            coming += int(slots.page_count[sequence.slot])
            self._requests.preempt(sequence)

    def _preemptible(self) -> list[Sequence]:
        """Sequences whose pages may be taken, oldest first. Followers of a prompt in computation go
        with their leader."""
        leaders = {id(task.leader) for task in self._batch.prefills}
        found = []
        for sequence in self._batch.owners:
            if sequence is None or sequence.active.request.mode is Mode.PREFILL:
                continue
            state = self._batch.slots.state[sequence.slot]
            if state == SlotState.RUNNING or id(sequence) in leaders:
                found.append(sequence)
        return sorted(found, key=lambda sequence: (sequence.active.seniority, sequence.choice))

    # -- chunks ------------------------------------------------------------------------------------

    def _cut_chunks(
        self, decodes: int, decode_tokens: int
    ) -> tuple[list[ChunkPlan], list[ScorePlan], list[Pool]]:
        config, limits, others = self._config, self._limits, self._batch.others
        if decodes and not self._lanes.mixes:
            return [], [], []
        most = limits.mixed_tokens if decodes or self._lanes.is_busy else limits.alone_tokens
        most = min(self._budget.tokens - decode_tokens, most)
        budget = self._lanes.chunk(self._waiting(), most)
        chunks: list[ChunkPlan] = []
        scores: list[ScorePlan] = []
        pools: list[Pool] = []
        first_token, first_sample = decode_tokens, decodes
        scratch = config.scratch_tokens if config.gathers else UNBOUNDED
        for task in self._batch.prefills:
            end = min(task.num_tokens, task.cursor + budget, scratch)
            end = others.most_end(task.leader.slot, end, self._batch.slots.final_pages)
            last = end == task.num_tokens
            if not last:
                end -= end % config.chunk_tokens
            if end <= task.cursor:
                break
            others.extend(task.leader.slot, end)
            score = _score_plan(task, end, first_token)
            pool = _pool(task, end, decodes + len(chunks), first_token)
            places = len(scores) if score else -1, len(pools) if pool else -1
            chunks.append(ChunkPlan(task, task.cursor, end, first_sample, *places))
            scores += [score] if score else []
            pools += [pool] if pool else []
            first_token += end - task.cursor
            first_sample += len(_first_draws(task)) if last else 0
            scratch -= end
            full = limits.full_tokens - (first_token - decode_tokens)
            budget = min(budget - (end - task.cursor), full)
        return chunks, scores, pools

    def _waiting(self) -> Iterator[int]:
        """Tokens of each prompt that is not computed whole, without those that were cached."""
        for task in self._batch.prefills:
            yield task.num_tokens - task.cached_tokens
        for active in self._requests.waiting:
            if active.request.mode is not Mode.RECEIVE:
                yield len(active.tokens) - active.cached_tokens

    def _advance(self, chunk: ChunkPlan) -> None:
        """Moves a chunk's task on; after the last one, its sequences into the batch."""
        task, active = chunk.task, chunk.task.leader.active
        if not active.started:
            active.started = True
            told = active.request.id, task.cached_tokens, time.time_ns(), task.loaded_tokens
            self._requests.emit(active.sink, PrefillStarted(*told))
        task.cursor = chunk.end
        self._batch.slots.set_kv(task.leader.slot, chunk.end)
        if task.remaining == 0:
            self._batch.prefills.remove(task)
            if active.request.mode.decodes:
                self._batch.fork(task.sequences)
                self._requests.join(active)

    # -- building ----------------------------------------------------------------------------------

    def _build(
        self,
        rows: Slots,
        width: int,
        chunks: list[ChunkPlan],
        scores: list[ScorePlan],
        pools: list[Pool],
    ) -> StepPlan:
        slots, others = self._batch.slots, self._batch.others
        bounds, least = self._bounds(rows, width), slots.least_kv(rows)
        known = self._widths is None or (width == 1 and bool((least == slots.kv_len[rows]).all()))
        row_slots = np.concatenate([rows, [c.task.leader.slot for c in chunks]]).astype(np.int32)
        contexts = np.concatenate([bounds, [c.end for c in chunks]]).astype(np.int32)
        stored_from = np.concatenate([least, [c.start for c in chunks]]).astype(np.int32)
        queries = contexts - stored_from
        positions = least
        if not known:
            queries[: rows.size] = width
            drafted = least[:, None] + np.arange(width, dtype=np.int32)
            positions = np.minimum(drafted, bounds[:, None] - 1).reshape(-1)
        prompt_ids = [c.task.tokens[c.start : c.end] for c in chunks]
        prompt_positions = [np.arange(c.start, c.end, dtype=np.int32) for c in chunks]
        samples = self._samples(rows, least, width, chunks)
        copies, writes, begins = self._batch.take_transfers()
        self._mark_written(row_slots, stored_from, contexts)
        sample = self._sample_plan(samples, known=known)
        adapters, wanted = self._batch.adapter_rows(row_slots)
        masked = np.flatnonzero(slots.is_masked[samples.slots]).astype(np.int32)
        arrived, undrafted = self._blocks.arrivals.take()
        table = self._page_table(row_slots, contexts)
        tables = others.tables(row_slots, stored_from, contexts, self._batch.next_step)
        return StepPlan(
            number=self._batch.next_step,
            token_ids=np.concatenate([np.zeros(positions.size, np.int32), *prompt_ids]),
            positions=np.concatenate([positions, *prompt_positions]),
            row_slots=row_slots,
            query_lens=queries,
            context_lens=contexts,
            num_decodes=int(rows.size),
            page_table=table,
            sample_tokens=samples.tokens,
            sample_slots=samples.slots,
            sample_generations=slots.generation[samples.slots],
            sample_indices=samples.indices,
            sample=sample,
            copy_source=np.fromiter(copies.values(), np.int32, len(copies)),
            copy_target=np.fromiter(copies.keys(), np.int32, len(copies)),
            write_slots=np.fromiter(writes.keys(), np.int32, len(writes)),
            write_tokens=np.fromiter(writes.values(), np.int32, len(writes)),
            arrived=arrived,
            undrafted=undrafted,
            drafted_from=self._blocks.arrivals.undrafted(table, stored_from // slots.page_size),
            hook_tags=self._batch.hook_tags(row_slots),
            masked=masked,
            whole_logits=masked.size > 0 or (sample is not None and not sample.is_greedy),
            scores=tuple(scores),
            pools=np.array(pools, np.int32) if pools else NO_POOLS,
            others=tables,
            searches=self._requests.choosing.planned(rows, least, chunks, table, tables),
            width=width,
            successors=np.array([_successor(c) for c in chunks], np.int32) if chunks else NO_IDS,
            begins=begins,
            adapters=adapters,
            adapters_wanted=wanted,
            returns_drafts=masked.size > 0 and bool(slots.drafts[samples.slots[masked]].any()),
        )

    def _samples(self, rows: Slots, least: Int32s, width: int, chunks: list[ChunkPlan]) -> _Samples:
        """The draws: one for every decode row, and one for each choice of every last chunk."""
        slots = self._batch.slots
        decode = rows.astype(np.int32)
        tokens, where = [np.arange(0, rows.size * width, width, dtype=np.int32)], [decode]
        indices = [least + 1 - slots.prompt_len[rows]]
        choices = [slots.noise_choice[rows]]
        last_token = rows.size * width - 1
        for chunk in chunks:
            last_token += chunk.end - chunk.start
            drawn = _first_draws(chunk.task) if chunk.is_last else []
            if drawn:
                tokens.append(np.full(len(drawn), last_token, np.int32))
                where.append(np.array([sequence.slot for sequence in drawn], np.int32))
                indices.append(np.array([len(sequence.outputs) for sequence in drawn], np.int32))
                choices.append(np.arange(len(drawn), dtype=np.int32) + drawn[0].noise_choice)
        return _Samples(
            *(np.concatenate(c).astype(np.int32) for c in (tokens, where, indices, choices))
        )

    def _sample_plan(self, samples: _Samples, *, known: bool) -> SamplePlan | None:
        if samples.slots.size == 0:
            return None
        return self._batch.sampler.plan(
            samples.slots, samples.indices, samples.choices, known=known
        )

    def _page_table(self, row_slots: Int32s, contexts: Int32s) -> Int32s:
        """[R, P], wide enough for the longest row. Beyond a row's context it has the scratch
        page."""
        slots, ahead = self._batch.slots, self._config.ahead_tokens
        used = -(-contexts // slots.page_size)
        if ahead:
            used = -(-(contexts + ahead) // slots.page_size)
            used = np.minimum(used, slots.page_count[row_slots])
        width = max(1, int(used.max(initial=1)))
        table = slots.page_table[row_slots, :width]
        return np.where(np.arange(width, dtype=np.int32) < used[:, None], table, SCRATCH_PAGE)

    def _mark_written(self, row_slots: Int32s, starts: Int32s, contexts: Int32s) -> None:
        """Makes this step the last writer of the pages of positions [start, context) of each
        row, and of those behind where its drafter stores something."""
        slots, ahead = self._batch.slots, self._config.ahead_tokens
        size, table = slots.page_size, slots.page_table
        if ahead:
            contexts = np.minimum(contexts + ahead, slots.page_count[row_slots] * size)
        single = contexts - starts == 1
        pages = [table[row_slots[single], starts[single] // size]]
        pages += [
            table[row_slots[i], starts[i] // size : -(-contexts[i] // size)]
            for i in np.flatnonzero(~single).tolist()
        ]
        self._blocks.mark_written(np.concatenate(pages), self._batch.next_step)


def _successor(chunk: ChunkPlan) -> int:
    """The token behind a chunk; -1: it is the last."""
    return -1 if chunk.is_last else int(chunk.task.tokens[chunk.end])


def _score_plan(task: PrefillTask, end: int, first_token: int) -> ScorePlan | None:
    """Positions of this chunk whose next prompt token needs a log probability."""
    request = task.leader.active.request
    next_ids = request.prompt_ids[task.cursor + 1 : end + 1]
    if not request.prompt_logprobs or task.leader.active.joined or next_ids.size == 0:
        return None
    return ScorePlan(first_token, next_ids, request.sampling.top_logprobs or 0)


def _pool(task: PrefillTask, end: int, row: int, first_token: int) -> Pool | None:
    """What this chunk adds to the prompt's pooled states."""
    pooling = task.leader.active.request.pooling
    found = pooling.rows(task.cursor, end, task.num_tokens) if pooling else None
    if pooling is None or found is None:
        return None
    return pooling.kind, row, first_token + found[0], found[1]


def _first_draws(task: PrefillTask) -> list[Sequence]:
    """One entry per token drawn from the prompt's last logits. A PREFILL request has one slot for
    all its choices."""
    request = task.leader.active.request
    if request.mode is Mode.POOL:
        return []
    if request.mode is Mode.PREFILL:
        return [task.leader] * request.first_tokens
    return task.sequences[: request.first_tokens] if request.beams else task.sequences
