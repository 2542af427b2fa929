"""The sampler: the host's columns, the device's history, and the calls that join them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.sampling import device_noise, ops
from engine.sampling.columns import Columns
from engine.sampling.history import History
from engine.speculation.tables import accepted
from engine.step.sampling import LogprobRows, Masks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from engine.speculation.verifying import Draws
    from engine.step.sampling import (
        Adjustments,
        Draw,
        Ints,
        Nucleus,
        Penalties,
        SamplePlan,
    )
    from engine.types import SamplingParams, StopRules, TokenIds


class SampleResult(NamedTuple):
    """The results of a step's rows, on the device."""

    tokens: Tensor
    """[R] int64."""
    finite: Tensor
    """[R] bool: the row had neither NaN nor infinity. If it is False, the token means nothing."""
    logprob: Tensor | None = None
    """[R] float32; 0 in rows that did not ask for it; None if no row did."""
    top_ids: Tensor | None = None
    """[R, N] int64, best first. N is the most that any row asked for. Rows that asked for no log
    probabilities hold 0. None if N would be 0."""
    top_logprobs: Tensor | None = None
    """[R, N] float32, in the order of `top_ids`."""
    margin: Tensor | None = None
    """[R] float64; None unless recorded. It is `ops.Drawn.margin` in a drawn row, and the gap
    between the two best logits in a greedy one."""
    counts: Tensor | None = None
    """[S] int64: leading columns of each draw that count. Then there are S draws of W columns: what
    is [R] is [S, W], but for `finite`, [S], which is of the columns that count."""


class Sampler:
    """Samples for sequences in slots. The package's docstring names the thread of each call."""

    def __init__(
        self,
        max_slots: int,
        vocab_size: int,
        device: torch.device | str,
        eos_ids: Iterable[int],
        record_margins: bool = False,
    ) -> None:
        self._columns = Columns(max_slots, vocab_size, eos_ids)
        self._max_slots = max_slots
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._record_margins = record_margins
        self.noise = device_noise.uniform
        """Makes noise on the device. A GPU has a kernel for it."""
        self._history: History | None = None
        """The device's tables. The first step that penalises a row makes them."""

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        stop: StopRules,
        choice: int,
        prompt_ids: TokenIds,
        generated_ids: TokenIds,
    ) -> None:
        """Gives the slot to a sequence and drops the slot's old data. Step loop's thread.

        `generated_ids` is the sequence's output so far: every token that no later plan draws.
        """
        self._columns.assign(slot, params, stop, choice, prompt_ids, generated_ids)

    def plan(
        self, slots: Ints, indices: Ints, choices: Ints | None = None, *, known: bool = True
    ) -> SamplePlan:
        """Plans one draw a row. Step loop's thread.

        Args:
            slots: [R], the slot whose options each row uses.
            indices: [R], output index that each row draws, from 0.
            choices: [R], used instead of the choices that the slots were assigned with. The rows of
                one slot can then be the first tokens of several choices. They share the slot's
                history, which belongs to one choice, so this is for output index 0 only.
            known: whether these are the indices. If not, the device knows them, and what depends on
                them is left to `verify`.
        """
        return self._columns.plan(slots, indices, choices, known=known)

    def sample(self, logits: Tensor, plan: SamplePlan, masks: Masks | None = None) -> SampleResult:
        """Draws the planned tokens and counts them for penalties. Executor's thread, in plan order.

        Args:
            logits: [R, V] float32, a row for each planned one; not changed.
            plan: the plan of the step.
            masks: the rows that may draw only some tokens, with those.
        """
        self._begin(plan.penalties)
        tokens, margin = self._column(logits, plan, masks)
        # A sum is the cheapest pass over a row that finds both NaN and infinity.
        finite = logits.sum(-1).isfinite()
        return SampleResult(tokens, finite, *self._score(logits, tokens, plan.logprobs), margin)

    def verify(
        self, logits: Tensor, plan: SamplePlan, draws: Draws, masks: Masks | None = None
    ) -> SampleResult:
        """Draws the tokens of steps that verify drafts: S draws of up to W columns. Penalties count
        tokens of columns that count. Executor's thread, in plan order.

        Args:
            logits: [L, V] float32; not changed.
            plan: the plan of the step, a row for each draw.
            draws: where the logits of each column are, and its drafts.
            masks: the columns that may draw only some tokens. A draw with masks counts only
                columns that have one.
        """
        valid, width = draws.valid, draws.ids.shape[1]
        if masks is not None:
            valid = valid.minimum(self._upload(_masked_columns(masks, draws.ids.shape)))
        self._begin(plan.penalties)
        tokens, margins = torch.zeros_like(draws.ids), []
        alive = valid > 0
        for column in range(width):
            own = None if masks is None else _masks_of(masks, column, width)
            drawn, margin = self._column(
                logits[draws.places[:, column]], plan, own, draws.indices + column, alive
            )
            tokens[:, column] = drawn
            margins.append(margin)
            if column + 1 < width:
                alive &= (valid > column + 1) & (drawn == draws.ids[:, column + 1])
                if alive.is_cpu and not alive.any():
                    break
        counts = accepted(draws.ids, tokens, valid)
        bad = ~logits.sum(-1).isfinite()[draws.places]
        counted = torch.arange(width, device=self._device) < counts[:, None]
        scores = self._score_columns(logits, draws.places, tokens, plan.logprobs)
        known = [margin for margin in margins if margin is not None]
        margin = torch.stack(known, dim=1) if known else None
        return SampleResult(tokens, ~(bad & counted).any(1), *scores, margin, counts)

    def _column(
        self,
        logits: Tensor,
        plan: SamplePlan,
        masks: Masks | None,
        indices: Tensor | None = None,
        alive: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One token a row, and the margins if they are recorded.

        Args:
            logits: [R, V].
            plan: the plan of the rows.
            masks: their masks.
            indices: [R] output indices; None: the plan has what depends on them.
            alive: [R], rows whose tokens penalties count; None: all.
        """
        shaped = self._shape(logits, plan, indices)
        if masks is not None:
            shaped = self._mask(shaped, masks)
        tokens, margin = self._choose(shaped, plan.draw, indices)
        if plan.penalties is not None:
            self._count(tokens, plan.penalties, alive)
        return tokens, margin

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _shape(self, logits: Tensor, plan: SamplePlan, indices: Tensor | None) -> Tensor:
        """The logits for the choice: adjusted, then penalised."""
        if plan.adjustments is None and plan.penalties is None:
            return logits
        logits = logits.clone()
        if plan.adjustments is not None:
            self._adjust(logits, plan.adjustments, indices)
        if plan.penalties is not None:
            self._penalise(logits, plan.penalties)
        return logits

    def _mask(self, logits: Tensor, masks: Masks) -> Tensor:
        bits = self._upload(masks.bits)
        if len(masks.rows) == len(logits):
            return ops.mask(logits, bits)
        rows = self._upload(masks.rows)
        return logits.index_copy(0, rows, ops.mask(logits[rows], bits))

    def _adjust(self, logits: Tensor, adjustments: Adjustments, indices: Tensor | None) -> None:
        where = self._upload(adjustments.rows), self._upload(adjustments.ids)
        values = self._upload(adjustments.values)
        if adjustments.until is None:
            logits[where] += values
            return
        assert indices is not None, "bounds are for indices that the host does not know"
        counts = indices[where[0]] < self._upload(adjustments.until)
        logits.index_put_(where, torch.where(counts, values, 0), accumulate=True)

    def _begin(self, penalties: Penalties | None) -> None:
        """Makes the tables ready for a step's draws."""
        if penalties is None:
            return
        if self._history is None:
            self._history = History(self._max_slots, self.vocab_size, self._device)
        if penalties.resets is not None:
            self._history.reset(*map(self._upload, penalties.resets))

    def _penalise(self, logits: Tensor, penalties: Penalties) -> None:
        assert self._history is not None, "a plan with penalties allocates it"
        rows, slots = self._upload(penalties.rows), self._upload(penalties.slots)
        logits[rows] = ops.penalise(
            logits[rows],
            self._history.counts[slots],
            self._history.in_prompt[slots],
            self._upload(penalties.repetition),
            self._upload(penalties.frequency),
            self._upload(penalties.presence),
        )

    def _count(self, tokens: Tensor, penalties: Penalties, alive: Tensor | None) -> None:
        assert self._history is not None, "a plan with penalties allocates it"
        slots, rows = self._upload(penalties.slots), self._upload(penalties.rows)
        self._history.count(slots, tokens[rows], None if alive is None else alive[rows])

    def _choose(
        self, logits: Tensor, draw: Draw | None, indices: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens, and the margins if they are recorded."""
        if draw is None:
            return self._greedy(logits)
        if len(draw.rows) == len(logits):
            tokens, margin = self._draw(logits, draw, indices)
            return tokens, margin if self._record_margins else None
        rows = self._upload(draw.rows)
        drawn = self._draw(logits[rows], draw, indices)
        tokens, margins = self._greedy(logits)
        tokens[rows] = drawn.tokens
        if margins is not None:
            margins[rows] = drawn.margin
        return tokens, margins

    def _greedy(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self._record_margins:
            return logits.argmax(-1), None
        best = logits.topk(2).values.double()
        return logits.argmax(-1), best[:, 0] - best[:, 1]

    def _draw(self, logits: Tensor, draw: Draw, indices: Tensor | None) -> ops.Drawn:
        scaled = ops.scale(logits, self._upload(draw.temperature))
        return ops.draw(scaled, self._floor(scaled, draw), self._uniforms(draw, indices))

    def _uniforms(self, draw: Draw, indices: Tensor | None) -> Tensor:
        """[D] float64: the rows' noise."""
        if draw.uniforms is not None:
            return self._upload(draw.uniforms)
        assert indices is not None, "the device knows what the host does not"
        assert draw.noise is not None, "the plan has either"
        seeds, choices = map(self._upload, draw.noise)
        return self.noise(seeds, choices, indices[self._upload(draw.rows)])

    def _floor(self, scaled: Tensor, draw: Draw) -> Tensor | None:
        """The least scaled logit that min-p, top-k and top-p keep."""
        if draw.floor is None and not draw.nuclei:
            return None
        floor = (
            scaled.new_full((len(scaled),), float("-inf"))
            if draw.floor is None
            else self._upload(draw.floor).clone()  # Later columns begin with the plan's, too.
        )
        for nucleus in draw.nuclei:
            rows = self._upload(nucleus.rows)
            floor[rows] = self._nucleus_floor(scaled[rows], floor[rows], nucleus)
        return floor

    def _nucleus_floor(self, scaled: Tensor, floor: Tensor, nucleus: Nucleus) -> Tensor:
        top_k, top_p = self._upload(nucleus.top_k), self._upload(nucleus.top_p)
        if nucleus.width is None:
            return ops.wide_nucleus_floor(scaled, floor, top_k, top_p)
        ranked = scaled.topk(nucleus.width).values
        return ops.nucleus_floor(ranked, floor, top_k, top_p)

    def _score(
        self, logits: Tensor, tokens: Tensor, wanted: LogprobRows | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Log probability, top ids and top log probabilities, in the form of `SampleResult`."""
        if wanted is None:
            return None, None, None
        if len(wanted.rows) == len(logits):
            scores = ops.score(logits, tokens, wanted.top_n)
            return scores if wanted.top_n else (scores.logprob, None, None)
        rows = self._upload(wanted.rows)
        scores = ops.score(logits[rows], tokens[rows], wanted.top_n)
        logprob = logits.new_zeros(len(logits)).index_copy_(0, rows, scores.logprob)
        if not wanted.top_n:
            return logprob, None, None
        shape = (len(logits), wanted.top_n)
        top_ids = tokens.new_zeros(shape).index_copy_(0, rows, scores.top_ids)
        top_logprobs = logits.new_zeros(shape).index_copy_(0, rows, scores.top_logprobs)
        return logprob, top_ids, top_logprobs

    def _score_columns(
        self, logits: Tensor, places: Tensor, tokens: Tensor, wanted: LogprobRows | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """`_score` of S draws of W columns: [S, W], [S, W, N] and [S, W, N]."""
        if wanted is None:
            return None, None, None
        draws, width = tokens.shape
        rows = (wanted.rows[:, None] * width + np.arange(width)).reshape(-1)
        flat = LogprobRows(rows, wanted.top_n)
        scores = self._score(logits[places.reshape(-1)], tokens.reshape(-1), flat)
        shape = (draws, width, -1)
        logprob, ids, best = (None if found is None else found.view(shape) for found in scores)
        return logprob if logprob is None else logprob[..., 0], ids, best


def _masked_columns(masks: Masks, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """[S]: columns of each draw that may count, as its masks say; all W of a draw without any."""
    draws, width = shape
    counts = np.bincount(masks.rows // width, minlength=draws)
    return np.where(counts > 0, counts, width)


def _masks_of(masks: Masks, column: int, width: int) -> Masks | None:
    """The masks of one column, by draw."""
    where = np.flatnonzero(masks.rows % width == column)
    return Masks(masks.rows[where] // width, masks.bits[where]) if where.size else None
