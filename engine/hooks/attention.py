"""Attention with hooks around it.

It wraps the backend that the worker has chosen. Rows that a hook has narrowed are computed apart in
the layers in which it chooses pages: their K and V are stored, and each KV head reads the pages
that were chosen for it. A head's share of a page is one run of bytes, so the pool, seen as pages of
one head each (`KvPool.by_head`), is read by the same backend.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.hooks.steps import StepHooks
from engine.pool.page_pool import PagePool
from engine.step.attention import AttentionBackend, AttentionBatch, Specs
from engine.step.hooks import DecodeRows, HookSite, Narrowed

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
MakeBackend = Callable[[PagePool, Specs], AttentionBackend]


class _Split(NamedTuple):
    """A batch whose narrowed rows are apart."""

    tokens: Tensor
    """[B], the narrowed rows' tokens among those of the step."""
    table: Tensor
    """[B, 1, P], their pages."""
    ends: Tensor
    """[B], tokens in KV after the step."""
    last: Tensor
    """[B, 1, 1], the place of each row's last page in the table."""
    counts: Tensor
    """[B, 1, 1], pages that a head reads."""
    contexts: Tensor
    """[B * Hkv], tokens that each head of each row reads."""
    columns: int
    """Most pages that a head reads."""
    rest: Tensor
    """The other tokens."""
    batch: AttentionBatch
    """Batch of the other rows."""
    heads: AttentionBatch
    """A row for each head of each narrowed row. The pages are others in each layer."""


class CalledAttention:
    """Attention over K and V that are in the pool already, with calls of hooks that choose nothing.
    A graph may capture it."""

    def __init__(self, attend: Attend, hooks: StepHooks) -> None:
        self._attend = attend
        self._hooks = hooks

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer. Shapes as in `AttentionBackend`."""
        self._hooks.attention_began(layer, q, k, v)
        out = self._attend(layer, q, k, v)
        self._hooks.attention_ended(layer, q, out)
        return out


class HookedAttention:
    """`AttentionBackend` that calls hooks. The fast path has its own (`engine.cuda.hooks`)."""

    def __init__(self, make: MakeBackend, site: HookSite, hooks: StepHooks) -> None:
        """`make` makes the wrapped backend over a pool."""
        pool = site.pool
        self._whole = make(pool, site.specs)
        self._others = make(pool, site.specs)
        """For the rows beside narrowed ones."""
        self._heads = make(pool.by_head(), site.specs)
        """For the narrowed ones."""
        self.name = self._whole.name
        self._pool = pool
        self._site = site
        self._hooks = hooks
        self._split: _Split | None = None

    def begin(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        self._batch = batch
        self._whole.begin(batch)
        narrowed = self._hooks.narrowed
        self._split = None if narrowed is None else self._split_off(batch, narrowed)
        if self._split is None:
            return
        if len(self._split.rest):
            self._others.begin(self._split.batch)
        self._heads.begin(self._split.heads)
        self._hooks.choosing_began(
            DecodeRows(
                table=self._split.table[:, 0],
                contexts=self._split.ends,
                counts=self._split.counts[:, 0, 0],
                most=self._split.columns,
                page_size=self._pool.page_size,
            )
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        self._hooks.attention_began(layer, q, k, v)
        out = self._narrowly(layer, q, k, v)
        if out is None:
            out = self._whole(layer, q, k, v)
        self._hooks.attention_ended(layer, q, out)
        return out

    def attend_ends(self, layer: int, q: Tensor, contexts: Tensor, page_table: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        return self._whole.attend_ends(layer, q, contexts, page_table)

    def _narrowly(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Attention with narrowed rows; None: there are none in this layer."""
        split = self._split
        if split is None or not self._site.may_choose(layer):
            return None
        # Before the hook is asked: the page that a token completes may be among those it reads.
        at, to = self._batch.token_pages[split.tokens], self._batch.token_offsets[split.tokens]
        self._pool.write(layer, at, to, k[split.tokens], v[split.tokens])
        own = q[split.tokens]
        shape = len(own), self._pool.num_kv_heads, split.columns
        wanted = self._hooks.pages_wanted(layer, own, shape)
        if wanted is None:
            return None
        out = torch.empty_like(q)
        out[split.tokens] = self._attend(layer, own, self._pages(wanted, split), split)
        if len(split.rest):
            rest = split.rest
            out[rest] = self._others(layer, q[rest], k[rest], v[rest])
        return out

    def _pages(self, wanted: Tensor, split: _Split) -> Tensor:
        """The pages at the places that a hook wants, [B, Hkv, C]. They are the row's own, whatever
        the hook says, so that no row reads what belongs to others."""
        column = torch.arange(split.columns, device=wanted.device)
        beyond = (wanted < 0) | (wanted > split.last)
        self._hooks.note_beyond((beyond & (column < split.counts)).any())
        own = torch.minimum(wanted.clamp_min(0), split.last)
        own = torch.where(column == split.counts - 1, split.last, own)
        return split.table.expand(-1, wanted.shape[1], -1).gather(2, own)

    def _attend(self, layer: int, q: Tensor, pages: Tensor, split: _Split) -> Tensor:
        """Attention of `q` [B, Hq, D] over `pages` [B, Hkv, C]."""
        heads = self._pool.num_kv_heads
        shares = pages * heads + torch.arange(heads, device=q.device)[:, None]
        grouped = q.reshape(len(q) * heads, -1, q.shape[-1])
        table = shares.reshape(len(grouped), -1).int()
        out = self._heads.attend_ends(layer, grouped, split.contexts, table)
        return out.reshape(q.shape)

    def _split_off(self, batch: AttentionBatch, narrowed: Narrowed) -> _Split:
        rows, counts, heads = narrowed.rows, narrowed.counts, self._pool.num_kv_heads
        last, tails = np.divmod(batch.context_lens[rows] - 1, self._pool.page_size)
        contexts = ((counts - 1) * self._pool.page_size + tails + 1).repeat(heads).astype(np.int32)
        others = np.setdiff1d(np.arange(len(batch.query_lens)), rows)
        on_device = partial(_on_device, device=batch.page_table.device)
        tokens = on_device(rows)
        rest = on_device(np.setdiff1d(np.arange(int(batch.query_lens.sum())), rows))
        nowhere = torch.zeros_like(tokens).repeat(heads)
        return _Split(
            tokens=tokens,
            table=batch.page_table[tokens][:, None],
            ends=on_device(batch.context_lens[rows]),
            last=on_device(last)[:, None, None],
            counts=on_device(counts)[:, None, None],
            contexts=on_device(contexts).int(),
            columns=int(counts.max()),
            rest=rest,
            batch=AttentionBatch(
                query_lens=batch.query_lens[others],
                context_lens=batch.context_lens[others],
                num_decodes=batch.num_decodes - len(rows),
                page_table=batch.page_table[on_device(others)],
                token_pages=batch.token_pages[rest],
                token_offsets=batch.token_offsets[rest],
            ),
            heads=AttentionBatch(
                query_lens=np.ones(len(contexts), np.int32),
                context_lens=contexts,
                num_decodes=len(contexts),
                page_table=nowhere[:, None].expand(-1, int(counts.max())),
                token_pages=nowhere,
                token_offsets=nowhere,
            ),
        )


def _on_device(numbers: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int64)).to(device, non_blocking=True)
