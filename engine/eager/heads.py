"""A draft head behind steps, in eager mode: PyTorch runs one operation at a time.

The head keeps K and V of each token in pages of its own, which have the ids of group 0's. What is
kept there may be wrong or missing: that costs speed alone. A page whose KV came from elsewhere may
lack the head's. Then rows see the head's KV behind the last such page only.

1. `begin` hears which pages came, and copies pages.
2. `learn` stores K and V of the step's tokens, from the taps of each and the token behind it.
3. `draft` guesses, one token of each row at a time. What it stores for these the next step
   overwrites.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.drafts.loading import DraftHead
from engine.pool.kv_pool import KvPool
from engine.speculation.drafter import Drafts
from engine.speculation.tables import SlotTables
from engine.step.attention import AttentionBatch, StepAttention
from engine.step.plan import StepPlan
from engine.types import SCRATCH_PAGE


class Computed(NamedTuple):
    """A step that the model has computed, T tokens in R rows."""

    plan: StepPlan
    """With lengths as they are."""
    batch: AttentionBatch
    """Pages of group 0."""
    token_ids: Tensor
    """[T] int64"""
    tapped: Tensor
    """[T, N * H], the taps."""
    decode_rows: int
    """Rows that decode."""


class _Learnt(NamedTuple):
    """What `draft` goes on from. S draws."""

    plan: StepPlan
    rows: NDArray[np.intp]
    """[S]. The row of each draw."""
    hidden: Tensor
    """[S, H]. What the head gives behind each draw."""
    first: NDArray[np.int64]
    """[S]. Drafts that may be there at all: none where nothing of a row counts, one where another
    draw has the row's pages."""


class HeadDrafter:
    """See the module. It is a `Drafter`."""

    name = "head"

    def __init__(self, head: DraftHead, pool: KvPool, attention: StepAttention, most: int) -> None:
        """`pool` has the head's K and V, and `attention` reads it."""
        self.most = most
        self.taps = head.taps
        self._head = head
        self._pool = pool
        self._attention = attention
        self._learnt: _Learnt | None = None

    def begin(self, plan: StepPlan) -> None:
        """A step begins."""
        if plan.undrafted.size:
            # Nothing of another sequence is read there.
            self._pool.data[self._upload(plan.undrafted)] = 0
        if plan.copy_source.size:
            self._pool.copy_pages(self._upload(plan.copy_source), self._upload(plan.copy_target))

    def learn(self, step: Computed, tokens: Tensor | None, counts: Tensor | None = None) -> None:
        """Stores K and V of a step's tokens.

        Args:
            step: the step.
            tokens: [S] or [S, W] int64, what was drawn, equal on all ranks; None: nothing was.
            counts: [S], leading tokens of each draw that count; None: one of each.
        """
        plan, ends = step.plan, np.cumsum(step.plan.query_lens)
        draws, first = self._draws(step, ends)
        behind = self._behind(step, ends, tokens, draws, first)
        positions = self._upload(plan.positions)
        self._attention.begin(self._seen(step.batch, plan.page_table, plan.drafted_from))
        features = self._head.features(step.tapped)
        hidden = self._head(behind, features, positions, self._attention)
        self._learnt = None
        if tokens is None:
            return
        last = draws.copy()
        most = np.where(first, self.most, 1)
        if counts is not None:
            own = counts.cpu().numpy()
            last[: step.decode_rows] += np.maximum(own[: step.decode_rows] - 1, 0)
            most = np.where(own > 0, most, 0)
        rows = np.searchsorted(ends, draws, side="right")
        self._learnt = _Learnt(plan, rows, hidden[self._upload(last)], most)

    def draft(self, tables: SlotTables, slots: Tensor) -> Drafts:
        """See `Drafter`. `learn` has seen the step."""
        learnt = self._learnt
        assert learnt is not None, "the step has drawn"
        lengths = tables.length[slots].cpu().numpy().astype(np.int64)
        features, ids = learnt.hidden, self._head.best(learnt.hidden)
        found, ready = [ids], np.minimum(learnt.first, 1)
        goes_on = (learnt.first > 1) & (lengths < self._head.longest)
        ready[lengths > self._head.longest] = 0
        for ahead in range(self.most - 1):
            positions = lengths + ahead
            batch, has_page = self._ahead(learnt, positions, goes_on)
            goes_on = has_page
            if not goes_on.any():
                break
            self._attention.begin(batch)
            features = self._head(ids, features, self._upload(positions), self._attention)
            ids = self._head.best(features)
            found.append(ids)
            ready += goes_on
        drafts = torch.stack(found, dim=1)
        missing = self.most - drafts.shape[1]
        drafts = torch.nn.functional.pad(drafts, (0, missing))
        return Drafts(drafts, torch.from_numpy(ready).to(drafts.device))

    def _draws(
        self, step: Computed, ends: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The first token of each draw among the step's, [S], and whether it is the first draw of
        its row."""
        plan, rows = step.plan, step.decode_rows
        decoded = int(ends[rows - 1]) if rows else 0
        own = ends[:rows] - plan.query_lens[:rows]
        drawn = plan.sample_tokens[plan.sample_tokens >= decoded]
        draws = np.concatenate([own, drawn]).astype(np.int64)
        first = np.ones(len(draws), np.bool_)
        first[1:] = draws[1:] != draws[:-1]
        return draws, first

    def _behind(
        self,
        step: Computed,
        ends: NDArray[np.int32],
        tokens: Tensor | None,
        draws: NDArray[np.int64],
        first: NDArray[np.bool_],
    ) -> Tensor:
        """[T] int64: the token behind each of the step's."""
        plan, rows = step.plan, step.decode_rows
        behind = step.token_ids.roll(-1)
        behind[self._upload(ends[rows:] - 1)] = self._upload(np.maximum(plan.successors, 0))
        if tokens is None:
            return behind
        columns = tokens if tokens.dim() > 1 else tokens[:, None]
        prompts = np.flatnonzero(first[rows:]) + rows
        behind[self._upload(draws[prompts])] = columns[self._upload(prompts), 0]
        if rows:
            lens = plan.query_lens[:rows]
            row = np.repeat(np.arange(rows), lens)
            column = np.arange(len(row)) - np.repeat(draws[:rows], lens)
            behind[: len(row)] = columns[self._upload(row), self._upload(column)]
        return behind

    def _ahead(
        self, learnt: _Learnt, positions: NDArray[np.int64], goes_on: NDArray[np.bool_]
    ) -> tuple[AttentionBatch, NDArray[np.bool_]]:
        """Rows of one token at [S] positions, and which of them have a page for it."""
        size = self._pool.page_size
        table, from_page = (
            each[learnt.rows] for each in (learnt.plan.page_table, learnt.plan.drafted_from)
        )
        index = positions // size
        inside = index < table.shape[1]
        pages = table[np.arange(len(table)), np.where(inside, index, 0)]
        has_page = goes_on & inside & (pages != SCRATCH_PAGE) & (positions < self._head.longest)
        pages = np.where(has_page, pages, SCRATCH_PAGE)
        contexts = np.where(has_page, positions + 1, 1).astype(np.int32)
        batch = AttentionBatch(
            query_lens=np.ones(len(table), np.int32),
            context_lens=contexts,
            num_decodes=len(table),
            page_table=self._upload(table),
            token_pages=self._upload(pages),
            token_offsets=self._upload(positions % size),
        )
        return self._seen(batch, table, np.where(has_page, from_page, 0)), has_page

    def _seen(
        self, batch: AttentionBatch, table: NDArray[np.int32], skipped: NDArray[np.int32]
    ) -> AttentionBatch:
        """The batch without the first pages of rows, [R] `skipped`, of which the last one lacks the
        head's KV. The page of a row's first token is always seen: it holds zeros where something is
        missing."""
        if not skipped.any():
            return batch
        size, at = self._pool.page_size, np.arange(table.shape[1])
        seen = np.minimum(at + skipped[:, None], table.shape[1] - 1)
        return AttentionBatch(
            query_lens=batch.query_lens,
            context_lens=(batch.context_lens - skipped * size).astype(np.int32),
            num_decodes=batch.num_decodes,
            page_table=self._upload(np.take_along_axis(table, seen, 1)),
            token_pages=batch.token_pages,
            token_offsets=batch.token_offsets,
        )

    def _upload(self, array: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._pool.device, non_blocking=True)
