"""Quest on GPUs. `baton_quest` has the method, and the same by PyTorch, which is the reference.

Nothing here waits for the device, and shapes depend on the number of rows alone, so a graph may
contain it. A row's summaries are read through its page table, page by page, and never gathered.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.hooks.protocol import DecodeRows
from engine.pool.kv_pool import KvPool

PAGES_AT_ONCE = 64
"""Pages of a program that scores. Each has a summary of 4 * D bytes: 32 KiB for D = 128."""
LEAST_GROUP = 16
"""Rows of the smallest matrix product."""
FILL = 128
FIRST = 3e38
"""The score of a page that is read in any case."""


@triton.jit
def _summarise(
    elements,
    exponents,
    pages,
    layers,
    summaries,
    is_summarised,
    page_stride,
    head_stride,
    layer_stride,
    exponents_page_stride,
    exponents_head_stride,
    exponents_offset,
    num_pages,
    rounded: tl.constexpr,
    page_size: tl.constexpr,
    padded_size: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
):
    page = tl.load(pages + tl.program_id(0)).to(tl.int64)
    index, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(2)
    layer = tl.load(layers + index).to(tl.int64)
    token = tl.arange(0, padded_size)
    at = tl.arange(0, padded_dim)
    real = (token < page_size)[:, None] & (at < dim)[None, :]
    keys = elements + page * page_stride + head * head_stride + layer * layer_stride
    k = tl.load(keys + token[:, None] * dim + at[None, :], mask=real, other=0.0).to(tl.float32)
    if rounded:
        own = exponents + page * exponents_page_stride + head * exponents_head_stride
        own += exponents_offset + layer * (2 * page_size)
        exponent = tl.load(own + token, mask=token < page_size, other=0).to(tl.int32)
        k *= ((exponent + 127) << 23).to(tl.float32, bitcast=True)[:, None]
    most = tl.max(tl.where(real, k, float("-inf")), axis=0)
    least = tl.min(tl.where(real, k, float("inf")), axis=0)
    to = summaries + ((index * num_pages + page) * heads + head) * (2 * dim) + at
    tl.store(to, most, mask=at < dim)
    tl.store(to + dim, least, mask=at < dim)
    tl.store(is_summarised + page, 1, mask=index + head == 0)


def summarise(
    pool: KvPool, pages: Tensor, layers: Tensor, summaries: Tensor, is_summarised: Tensor
) -> None:
    """Summarises pages.

    Args:
        pool: holds their keys.
        pages: [N] int64.
        layers: [L] int32, layers of the pool.
        summaries: [L, num_pages, Hkv, 2 * D]: greatest elements, then least ones.
        is_summarised: [num_pages] uint8, becomes 1.
    """
    if not len(pages):
        return
    rounded = pool.precision == "fp8"
    _summarise[len(pages), len(layers), pool.num_kv_heads](
        pool.elements,
        pool.data.view(torch.int8) if rounded else pool.elements,
        pages,
        layers,
        summaries,
        is_summarised,
        pool.page_stride,
        pool.head_stride,
        pool.layer_stride,
        pool.page_bytes,
        pool.head_bytes,
        pool.head_values,
        pool.num_pages,
        rounded,
        pool.page_size,
        triton.next_power_of_2(pool.page_size),
        pool.head_dim,
        triton.next_power_of_2(pool.head_dim),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["q_stride", "table_stride", "width"])
def _score(
    q,
    table,
    contexts,
    counts,
    summaries,
    is_summarised,
    scores,
    q_stride,
    table_stride,
    width,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    page_size: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    first_score: tl.constexpr,
    block: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    last = (tl.load(contexts + row).to(tl.int32) - 1) // page_size
    start = tl.program_id(2) * block
    if (tl.load(counts + row) == 0) | (start >= last):
        return
    place = start + tl.arange(0, block)
    there = place < last
    page = tl.load(table + row * table_stride + place, mask=there, other=0).to(tl.int64)
    at, of_group = tl.arange(0, padded_dim), tl.arange(0, padded_group)
    ours = of_group < group
    query = q + row * q_stride + (head * group + of_group)[:, None] * dim + at[None, :]
    query = tl.load(query, mask=ours[:, None] & (at < dim)[None, :], other=0.0)
    nothing = tl.zeros_like(query)
    summary = (summaries + (page * heads + head) * (2 * dim))[:, None] + at[None, :]
    read = there[:, None] & (at < dim)[None, :]
    most = tl.load(summary, mask=read, other=0.0)
    least = tl.load(summary + dim, mask=read, other=0.0)
    above = tl.where(query > 0, query, nothing)
    below = tl.where(query > 0, nothing, query)
    bounds = tl.dot(above, tl.trans(most), input_precision="ieee")
    bounds = tl.dot(below, tl.trans(least), bounds, input_precision="ieee")
    best = tl.max(tl.where(ours[:, None], bounds, float("-inf")), axis=0)
    known = tl.load(is_summarised + page, mask=there, other=1) != 0
    best = tl.where(known & (place > 0), best, first_score)
    tl.store(scores + (row * heads + head) * width + place, best, mask=there)


@triton.jit(do_not_specialize=["width", "columns"])
def _select(
    scores,
    contexts,
    counts,
    wanted,
    width,
    columns,
    page_size: tl.constexpr,
    padded: tl.constexpr,
    fill: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(counts + row).to(tl.int32)
    if count == 0:
        return
    own = row * tl.num_programs(1) + head
    last = (tl.load(contexts + row).to(tl.int32) - 1) // page_size
    want = count - 1  # The last page is not among those to choose.
    at = tl.arange(0, padded)
    there = at < last
    score = tl.load(scores + own * width + at, mask=there, other=0.0)
    bits = score.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # In the order of the numbers.
    # The rank of the last that is taken, from its highest bit on. -2**31 + 1 would be a NaN's.
    least = tl.where(tl.sum((there & (rank >= 0)).to(tl.int32), axis=0) >= want, 0, -2147483648)
    for step in range(31):
        higher = least + (1 << (30 - step))
        found = tl.sum((there & (rank >= higher)).to(tl.int32), axis=0)
        least = tl.where(found >= want, higher, least)
    better = there & (rank > least)
    equal = there & (rank == least)
    missing = want - tl.sum(better.to(tl.int32), axis=0)
    taken = better | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= missing))
    to = wanted + own * columns
    tl.store(to + tl.cumsum(taken.to(tl.int32), axis=0) - 1, at.to(tl.int64), mask=taken)
    for start in tl.range(want, columns, fill):
        behind = start + tl.arange(0, fill)
        tl.store(to + behind, last.to(tl.int64) + behind * 0, mask=behind < columns)


class Choice:
    """The places of the pages that rows of one step read."""

    def __init__(self) -> None:
        self._padded = 1
        """Columns for which the selection is compiled. The calls before the first step have the
        most."""

    def __call__(
        self, q: Tensor, summaries: Tensor, is_summarised: Tensor, rows: DecodeRows
    ) -> Tensor:
        """In one layer.

        Args:
            q: [B, Hq, D], with any stride between rows.
            summaries: [num_pages, Hkv, 2 * D] of the layer.
            is_summarised: [num_pages] uint8.
            rows: the rows.

        Returns:
            [B, Hkv, C] int64, in ascending order. Those of rows that are not narrowed are not
            filled in.
        """
        count, heads, dim = q.shape
        kv_heads, width = summaries.shape[1], rows.table.shape[1]
        group = heads // kv_heads
        scores = torch.empty(count, kv_heads, width, dtype=torch.float32, device=q.device)
        _score[count, kv_heads, triton.cdiv(width, PAGES_AT_ONCE)](
            q,
            rows.table,
            rows.contexts,
            rows.counts,
            summaries,
            is_summarised,
            scores,
            q.stride(0),
            rows.table.stride(0),
            width,
            group,
            max(LEAST_GROUP, triton.next_power_of_2(group)),
            rows.page_size,
            dim,
            triton.next_power_of_2(dim),
            FIRST,
            PAGES_AT_ONCE,
            num_warps=4,
        )
        self._padded = max(self._padded, triton.next_power_of_2(width))
        wanted = torch.empty(count, kv_heads, rows.most, dtype=torch.int64, device=q.device)
        _select[count, kv_heads](
            scores,
            rows.contexts,
            rows.counts,
            wanted,
            width,
            rows.most,
            rows.page_size,
            self._padded,
            FILL,
            num_warps=4 if self._padded <= 2048 else 16,
        )
        return wanted
