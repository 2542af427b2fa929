"""The host half of the sampler: the options of the sequence in each slot, one column an option.

It belongs to the step loop's thread.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.sampling.noise import uniform
from engine.step.sampling import (
    I64,
    Adjustments,
    Draw,
    Ints,
    LogprobRows,
    NoiseKeys,
    Nucleus,
    Penalties,
    Resets,
    SamplePlan,
)
from engine.stopping import end_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from engine.types import SamplingParams, StopRules, TokenIds


ALWAYS = np.iinfo(np.int64).max
"""Bound on the output index of what has none."""
NARROW = 1024
"""Largest top-k for which a row's best logits are selected. Beyond it the row is sorted."""


class Need(enum.IntFlag):
    """The work for a slot's sequence beyond an argmax."""

    DRAW = 1
    MIN_P = 2
    NUCLEUS = 4
    PENALTIES = 8
    BIAS = 16
    MIN_TOKENS = 32
    LOGPROBS = 64


class _Adjustment(NamedTuple):
    ids: I64
    values: NDArray[np.float32]

    @classmethod
    def of(cls, values: Mapping[int, float]) -> _Adjustment:
        return cls(
            np.fromiter(values.keys(), np.int64, len(values)),
            np.fromiter(values.values(), np.float32, len(values)),
        )


class _History(NamedTuple):
    prompt_ids: TokenIds
    generated_ids: TokenIds


_NO_ADJUSTMENT = _Adjustment.of({})


class Columns:
    """Options by slot. They are made into plans."""

    def __init__(self, max_slots: int, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._needs = np.zeros(max_slots, np.uint8)
        self._seed = np.zeros(max_slots, np.uint64)
        self._choice = np.zeros(max_slots, np.int64)
        self._temperature = np.ones(max_slots, np.float32)
        self._floor = np.zeros(max_slots, np.float32)
        self._top_k = np.zeros(max_slots, np.int64)
        self._top_p = np.zeros(max_slots, np.float64)
        self._repetition = np.ones(max_slots, np.float32)
        self._frequency = np.zeros(max_slots, np.float32)
        self._presence = np.zeros(max_slots, np.float32)
        self._min_tokens = np.zeros(max_slots, np.int64)
        self._top_n = np.zeros(max_slots, np.int64)
        self._early = [_NO_ADJUSTMENT] * max_slots
        """Biases, and ids that must not be drawn while the output is shorter than `min_tokens`."""
        self._ends = [_NO_ADJUSTMENT] * max_slots
        """Ids that end a sequence, alone."""
        self._late = [_NO_ADJUSTMENT] * max_slots
        self._pending: dict[int, _History] = {}
        """Slots with penalties that got a new sequence since the last plan with penalties."""

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        stop: StopRules,
        choice: int,
        prompt_ids: TokenIds,
        generated_ids: TokenIds,
    ) -> None:
        """See `Sampler.assign`."""
        self._needs[slot] = 0
        self._assign_draw(slot, params, choice)
        self._assign_penalties(slot, params, prompt_ids, generated_ids)
        self._assign_adjustments(slot, params, stop)
        if params.top_logprobs is not None:
            self._need(slot, Need.LOGPROBS)
            self._top_n[slot] = min(params.top_logprobs, self._vocab_size)

    def _need(self, slot: int, need: Need) -> None:
        self._needs[slot] |= need

    def _assign_draw(self, slot: int, params: SamplingParams, choice: int) -> None:
        if params.temperature <= 0:
            return
        self._need(slot, Need.DRAW)
        self._seed[slot] = params.seed
        self._choice[slot] = choice
        self._temperature[slot] = params.temperature
        self._floor[slot] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        if params.min_p > 0:
            self._need(slot, Need.MIN_P)
        cut_k = 0 < params.top_k < self._vocab_size
        cut_p = params.top_p < 1
        self._top_k[slot] = params.top_k if cut_k else self._vocab_size
        self._top_p[slot] = params.top_p if cut_p else math.inf
        if cut_k or cut_p:
            self._need(slot, Need.NUCLEUS)

    def _assign_penalties(
        self, slot: int, params: SamplingParams, prompt_ids: TokenIds, generated_ids: TokenIds
    ) -> None:
        self._repetition[slot] = params.repetition_penalty
        self._frequency[slot] = params.frequency_penalty
        self._presence[slot] = params.presence_penalty
        self._pending.pop(slot, None)
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            self._need(slot, Need.PENALTIES)
            self._pending[slot] = _History(prompt_ids.copy(), generated_ids.copy())

    def _assign_adjustments(self, slot: int, params: SamplingParams, stop: StopRules) -> None:
        bias = self._drawable(params.logit_bias)
        ends = self._drawable(dict.fromkeys(end_ids(stop, self._eos_ids), -math.inf))
        self._min_tokens[slot] = stop.min_tokens
        self._late[slot] = _Adjustment.of(bias)
        self._early[slot] = _Adjustment.of({**bias, **ends})
        self._ends[slot] = _Adjustment.of(ends)
        if bias:
            self._need(slot, Need.BIAS)
        if ends and stop.min_tokens > 0:
            self._need(slot, Need.MIN_TOKENS)

    def _drawable(self, values: Mapping[int, float]) -> dict[int, float]:
        """Drops ids beyond the vocabulary, since they are never drawn."""
        return {token: value for token, value in values.items() if 0 <= token < self._vocab_size}

    def plan(
        self, slots: Ints, indices: Ints, choices: Ints | None, *, known: bool = True
    ) -> SamplePlan:
        """See `Sampler.plan`."""
        needs = self._needs[slots]
        asked = int(np.bitwise_or.reduce(needs))
        if not asked:
            return SamplePlan(len(slots))
        return SamplePlan(
            num_rows=len(slots),
            draw=self._plan_draw(needs, slots, indices if known else None, choices)
            if asked & Need.DRAW
            else None,
            penalties=self._plan_penalties(needs, slots) if asked & Need.PENALTIES else None,
            adjustments=self._plan_adjustments(needs, slots, indices, known)
            if asked & (Need.BIAS | Need.MIN_TOKENS)
            else None,
            logprobs=self._plan_logprobs(needs, slots) if asked & Need.LOGPROBS else None,
        )

    def _plan_draw(
        self, needs: NDArray[np.uint8], slots: Ints, indices: Ints | None, choices: Ints | None
    ) -> Draw:
        rows = np.flatnonzero(needs & Need.DRAW)
        drawn, needs = slots[rows], needs[rows]
        seeds = self._seed[drawn]
        keys = self._choice[drawn] if choices is None else choices[rows].astype(np.int64)
        return Draw(
            rows=rows,
            temperature=self._temperature[drawn],
            uniforms=None if indices is None else uniform(seeds, keys, indices[rows]),
            floor=self._floor[drawn] if (needs & Need.MIN_P).any() else None,
            nuclei=self._plan_nuclei(needs, drawn),
            noise=NoiseKeys(seeds.view(np.int64), keys) if indices is None else None,
        )

    def _plan_nuclei(self, needs: NDArray[np.uint8], slots: Ints) -> tuple[Nucleus, ...]:
        """Plans narrow and wide rows separately. A wide row needs a sort, and a narrow one does
        not."""
        rows = np.flatnonzero(needs & Need.NUCLEUS)
        if not len(rows):
            return ()
        narrow = self._top_k[slots[rows]] <= NARROW
        parts = (
            self._nucleus(rows[narrow], slots, True),
            self._nucleus(rows[~narrow], slots, False),
        )
        return tuple(part for part in parts if len(part.rows))

    def _nucleus(self, rows: I64, slots: Ints, narrow: bool) -> Nucleus:
        top_k = self._top_k[slots[rows]]
        width = int(top_k.max(initial=0)) if narrow else None
        return Nucleus(rows, top_k, self._top_p[slots[rows]], width)

    def _plan_penalties(self, needs: NDArray[np.uint8], slots: Ints) -> Penalties:
        rows = np.flatnonzero(needs & Need.PENALTIES)
        penalised = slots[rows].astype(np.int64)
        return Penalties(
            rows=rows,
            slots=penalised,
            repetition=self._repetition[penalised],
            frequency=self._frequency[penalised],
            presence=self._presence[penalised],
            resets=self._take_resets(),
        )

    def _take_resets(self) -> Resets | None:
        if not self._pending:
            return None
        slots = np.fromiter(self._pending, np.int64, len(self._pending))
        prompts = [history.prompt_ids for history in self._pending.values()]
        outputs = [history.generated_ids for history in self._pending.values()]
        self._pending = {}
        return Resets(
            slots=slots,
            prompt_slots=np.repeat(slots, [len(ids) for ids in prompts]),
            prompt_ids=np.concatenate(prompts).astype(np.int64),
            generated_slots=np.repeat(slots, [len(ids) for ids in outputs]),
            generated_ids=np.concatenate(outputs).astype(np.int64),
        )

    def _plan_adjustments(
        self, needs: NDArray[np.uint8], slots: Ints, indices: Ints, known: bool
    ) -> Adjustments | None:
        early = ((needs & Need.MIN_TOKENS) > 0) & (indices < self._min_tokens[slots])
        if not known and early.any():
            return self._plan_bounded(needs, slots, early)
        rows = np.flatnonzero(early | ((needs & Need.BIAS) > 0))
        if not len(rows):
            return None
        parts = [(self._early if early[row] else self._late)[slots[row]] for row in rows]
        return Adjustments(
            rows=np.repeat(rows, [len(part.ids) for part in parts]),
            ids=np.concatenate([part.ids for part in parts]),
            values=np.concatenate([part.values for part in parts]),
        )

    def _plan_bounded(
        self, needs: NDArray[np.uint8], slots: Ints, early: NDArray[np.bool_]
    ) -> Adjustments:
        """Adjustments of rows some of which may be past their `min_tokens`: the device finds out.
        What is biased may not end the sequence before that, either: minus infinity stays."""
        parts = [(row, self._late[slots[row]], ALWAYS) for row in np.flatnonzero(needs & Need.BIAS)]
        parts += [
            (row, self._ends[slots[row]], int(self._min_tokens[slots[row]]))
            for row in np.flatnonzero(early)
        ]
        counts = [len(part.ids) for _, part, _ in parts]
        return Adjustments(
            rows=np.repeat(np.array([row for row, _, _ in parts], np.int64), counts),
            ids=np.concatenate([part.ids for _, part, _ in parts]),
            values=np.concatenate([part.values for _, part, _ in parts]),
            until=np.repeat(np.array([until for _, _, until in parts], np.int64), counts),
        )

    def _plan_logprobs(self, needs: NDArray[np.uint8], slots: Ints) -> LogprobRows:
        rows = np.flatnonzero(needs & Need.LOGPROBS)
        return LogprobRows(rows, int(self._top_n[slots[rows]].max()))
