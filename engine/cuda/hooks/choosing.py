"""Attention of decode rows of which some read only the pages that a hook chooses.

The shapes depend on the number of rows alone, so a graph can contain it: in a layer in which a hook
may choose, every KV head of every row has a table of its own. A narrowed row's table has the pages
that were chosen, any other row's has all that it owns. The pool, seen as pages of one head each
(`KvPool.by_head`), is then read by the attention of the other layers.

K and V of the step are in the pool before. Prompts beside the decode rows read all their pages.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.paged import PagedAttention, PagedStep
from engine.cuda.kernels import launch, pieces_of
from engine.hooks.steps import StepHooks
from engine.step.hooks import DecodeRows, HookSite

_BLOCK = 512
"""Pages that a program scores at once. Not tuned."""


@triton.jit(do_not_specialize=["columns", "table_stride", "width"])
def _head_tables(
    wanted,
    table,
    contexts,
    counts,
    out,
    beyond,
    columns,
    table_stride,
    width,
    page_size: tl.constexpr,
    block: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    last = ((tl.load(contexts + row) - 1) // page_size).to(tl.int64)
    count = tl.load(counts + row).to(tl.int64)
    chosen = count > 0
    read = tl.where(chosen, count, last + 1)
    at = tl.program_id(2).to(tl.int64) * block + tl.arange(0, block)
    inside = at < read
    own = row * heads + head
    place = tl.load(wanted + own * columns + at, mask=inside & chosen, other=0)
    wrong = (place < 0) | (place > last)
    tl.store(beyond + at * 0, 1, mask=wrong)
    place = tl.minimum(tl.maximum(place, 0), last)
    place = tl.where(at == count - 1, last, place)
    place = tl.where(chosen, place, at)
    page = tl.load(table + row * table_stride + place, mask=inside, other=0).to(tl.int32)
    tl.store(out + own * width + at, page * heads + head, mask=inside)


def head_tables(wanted: Tensor, rows: DecodeRows, beyond: Tensor) -> Tensor:
    """The page table of each KV head of each row, in pages of one head.

    Args:
        wanted: [B, Hkv, C] int64, places in the tables of narrowed rows. A row's last page is read
            in any case, as the last of its count.
        rows: the rows.
        beyond: int32, one number: becomes 1 if a place is none of its row's.

    Returns:
        [B * Hkv, P] int32. Beyond the pages that a head reads it is not filled in.
    """
    count, heads, columns = wanted.shape
    width = rows.table.shape[1]
    out = torch.empty(count * heads, width, dtype=torch.int32, device=wanted.device)
    launch(
        _head_tables,
        (count, heads, pieces_of(width, _BLOCK)),
        wanted,
        rows.table,
        rows.contexts,
        rows.counts,
        out,
        beyond,
        columns,
        rows.table.stride(0),
        width,
        rows.page_size,
        _BLOCK,
    )
    return out


class ChosenAttention:
    """Attention in steps with narrowed rows. A graph may capture it."""

    def __init__(
        self, attention: PagedAttention, heads: PagedAttention, site: HookSite, hooks: StepHooks
    ) -> None:
        """`attention` is that of other steps, and `heads` the same over `KvPool.by_head`."""
        self._attention = attention
        self._heads = heads
        self._site = site
        self._hooks = hooks
        self._kv_heads = site.pool.num_kv_heads
        self._beyond = torch.zeros(1, dtype=torch.int32, device=site.pool.device)

    def note_beyond(self) -> None:
        """The forward pass is queued. Its places beyond what rows have are reported at its end."""
        self._hooks.note_beyond(self._beyond)

    def begin(self, rows: DecodeRows, *, differ: bool) -> None:
        """The forward pass begins. `attention` is prepared.

        Args:
            rows: all decode rows.
            differ: whether the rows differ in what they read (`engine.attention.parts`).
        """
        self._rows = rows
        self._beyond.zero_()
        tails = (rows.contexts - 1) % rows.page_size + 1
        read = (rows.counts - 1) * rows.page_size + tails
        read = torch.where(rows.counts > 0, read, rows.contexts).int()
        self._contexts = read[:, None].repeat(1, self._kv_heads).flatten()
        # A step's table is that of a layer, and comes with the call.
        self._heads.prepare(
            PagedStep(len(self._contexts), self._contexts, rows.table, None, 0, True, differ)
        )
        self._hooks.choosing_began(rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer. Shapes as in `AttentionBackend`."""
        if not self._site.may_choose(layer):
            return self._attention.attend(layer, q, k, v)
        return self._attention.attend(layer, q, k, v, self._decode)

    def _decode(self, layer: int, q: Tensor) -> Tensor | None:
        """Decode rows, [B, Hq, D]; None: all read all their pages."""
        shape = len(q), self._kv_heads, self._rows.most
        wanted = self._hooks.pages_wanted(layer, q, shape)
        if wanted is None:
            return None
        tables = head_tables(wanted.contiguous(), self._rows, self._beyond)
        grouped = q.reshape(len(q) * self._kv_heads, -1, q.shape[-1])
        out = self._heads.attend_ends(layer, grouped, self._contexts, tables)
        return out.view(q.shape)
