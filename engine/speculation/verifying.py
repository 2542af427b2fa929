"""A step that verifies drafts, in eager mode: PyTorch runs one operation at a time.

It computes the columns that may count and no others: a row without drafts costs one token, as in a
step without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.speculation.drafter import Drafter
from engine.speculation.tables import Columns, SlotTables
from engine.step.plan import StepPlan


class Draws(NamedTuple):
    """S draws of a step, W columns each."""

    places: Tensor
    """[S, W] int64: the row of the step's logits from which each column is drawn; any row for a
    column that cannot count."""
    ids: Tensor
    """[S, W] int64: input token of each column. That of column j + 1 is the draft for the draw of
    column j."""
    valid: Tensor
    """[S] int64: leading columns that may count."""
    indices: Tensor
    """[S] int64: output index of the first column's token."""


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """One step, as the device knows it."""

    plan: StepPlan
    """With lengths as they are: rows are ragged, and `sample_tokens` [L] are all positions whose
    logits a draw may read."""
    columns: Columns
    draws: Draws
    unstored: NDArray[np.intp]
    """Tokens of rows whose pages have no position left in this step: they compute something, and
    store nothing."""


class Verifier:
    """Knows lengths and drafts. Belongs to the device's thread."""

    def __init__(self, tables: SlotTables, drafter: Drafter) -> None:
        self.tables = tables
        self._drafter = drafter

    def begin(self, plan: StepPlan) -> Verification:
        """Takes what the host knows, and finds the step's tokens. It waits for the device."""
        tables = self.tables
        if plan.begins is not None:
            tables.begin(plan.begins)
        if plan.write_slots.size:
            tables.write(_long(plan.write_slots, tables), _long(plan.write_tokens, tables))
        columns = tables.columns(plan)
        valid = columns.valid.cpu().numpy()
        lengths = columns.lengths.cpu().numpy()
        counts = np.maximum(valid, 1)
        starts = lengths - (valid == 0)
        rows = np.repeat(np.arange(len(counts)), counts)
        firsts = np.cumsum(counts) - counts
        offsets = np.arange(len(rows)) - firsts[rows]
        own = columns.ids.cpu().numpy()[rows, offsets], starts[rows] + offsets
        return Verification(
            plan=_exact(plan, starts, counts, *own),
            columns=columns,
            draws=self._draws(plan, columns, firsts, counts),
            unstored=firsts[valid == 0],
        )

    def end(self, step: Verification, slots: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Takes what was drawn, and drafts what may follow.

        Args:
            step: the step.
            slots: [S] int64, its draws' slots.
            tokens: [S, W] int64.
            counts: [S] int64, leading tokens of each draw that count.
        """
        decodes = len(step.columns.slots)
        self.tables.advance(step.columns, tokens[:decodes], counts[:decodes])
        self.tables.write(slots[decodes:], tokens[decodes:, 0])
        self.tables.set_drafts(slots, *self._drafter.draft(self.tables, slots))

    def _draws(
        self,
        plan: StepPlan,
        columns: Columns,
        firsts: NDArray[np.intp],
        counts: NDArray[np.intp],
    ) -> Draws:
        decodes, draws, width = plan.num_decodes, len(plan.sample_slots), plan.width
        places = np.zeros((draws, width), np.int64)
        last = counts[:, None] - 1
        places[:decodes] = firsts[:, None] + np.minimum(np.arange(width), last)
        places[decodes:] = int(counts.sum()) + np.arange(draws - decodes)[:, None]
        prompts = draws - decodes
        indices = _long(plan.sample_indices, self.tables)
        indices[:decodes] = self.tables.indices(columns.slots)
        return Draws(
            places=_long(places, self.tables),
            ids=torch.nn.functional.pad(columns.ids, (0, 0, 0, prompts)),
            valid=torch.nn.functional.pad(columns.valid, (0, prompts), value=1),
            indices=indices,
        )


def _exact(
    plan: StepPlan,
    starts: NDArray[np.intp],
    counts: NDArray[np.intp],
    token_ids: NDArray[np.integer],
    positions: NDArray[np.integer],
) -> StepPlan:
    """The plan with the tokens of its decode rows, of which row i has `counts[i]` from position
    `starts[i]` on. Rows of several tokens are as prompts are."""
    decodes, planned = plan.num_decodes, plan.decode_tokens
    shift = len(token_ids) - planned
    contexts, queries = plan.context_lens.copy(), plan.query_lens.copy()
    contexts[:decodes], queries[:decodes] = starts + counts, counts
    drawn = plan.sample_tokens[decodes:] + shift
    return replace(
        plan,
        token_ids=np.concatenate([token_ids, plan.token_ids[planned:]]).astype(np.int32),
        positions=np.concatenate([positions, plan.positions[planned:]]).astype(np.int32),
        query_lens=queries,
        context_lens=contexts,
        num_decodes=decodes if len(token_ids) == decodes else 0,
        sample_tokens=np.concatenate([np.arange(len(token_ids)), drawn]).astype(np.int32),
        scores=tuple(
            replace(wanted, first_token=wanted.first_token + shift) for wanted in plan.scores
        ),
        pools=plan.pools + np.array([0, 0, shift, 0], np.int32),
    )


def _long(array: NDArray[np.integer], tables: SlotTables) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(tables.device, non_blocking=True)
