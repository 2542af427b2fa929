"""Attention of decode rows over the paged pool: one new token a row, split along the context.

Flash decoding (Dao et al. 2023) for pages: a program takes one KV head of one row, and of its
context one of `splits` equal parts; all query heads of the KV head share the loads. A second
kernel merges the parts. Where a part begins depends on the row's own length and on the batch's
bucket, on nothing else: a row's result is the same whatever the other rows hold.

Bounded by memory: every byte of K and V is read once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch
from engine.kv_pool import KvPool

BLOCK_TOKENS = 64
PROGRAMS_WANTED = 512
"""About four for each of a Hopper's 132 processors; twice as many were slower at 32 rows."""
MAX_SPLITS = 32
WARPS = 2
STAGES = 3
MIN_GROUP = 16
"""Rows of the smallest matrix product: query heads of a KV head are padded to it."""


@triton.jit(do_not_specialize=["table_width", "window"])
def _attend_part(
    q,
    pool,
    contexts,
    page_table,
    partial,
    sums,
    out,
    scale,
    page_stride,
    head_stride,
    layer_offset,
    table_width,
    q_row_stride,
    window,
    splits: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    dim: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
):
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    context = tl.load(contexts + row)
    first = tl.maximum(context - window, 0) // block * block
    share = tl.cdiv(tl.cdiv(context - first, splits), block) * block
    begin = first + part * share
    end = tl.minimum(begin + share, context)
    heads = tl.arange(0, padded_group)
    at = tl.arange(0, dim)
    real = (heads < group)[:, None]
    q_at = row * q_row_stride + (kv_head * group + heads[:, None]) * dim + at[None, :]
    query = tl.load(q + q_at, mask=real, other=0.0)
    most = tl.full((padded_group,), float("-inf"), tl.float32)
    total = tl.zeros((padded_group,), tl.float32)
    acc = tl.zeros((padded_group, dim), tl.float32)
    base = pool + layer_offset + kv_head.to(tl.int64) * head_stride
    tokens = tl.arange(0, block)
    for start in tl.range(begin, end, block):
        position = start + tokens
        seen = position < end
        page = tl.load(page_table + row * table_width + position // page_size, mask=seen, other=0)
        keys = base + page.to(tl.int64) * page_stride + (position % page_size) * dim
        k = tl.load(keys[:, None] + at[None, :], mask=seen[:, None], other=0.0)
        v = tl.load(keys[:, None] + page_size * dim + at[None, :], mask=seen[:, None], other=0.0)
        logits = tl.dot(query, k.T) * scale
        seen &= position >= context - window
        logits = tl.where(seen[None, :], logits, float("-inf"))
        now = tl.maximum(most, tl.max(logits, axis=1))
        kept = tl.exp2(most - now)
        weights = tl.exp2(logits - now[:, None])
        total = total * kept + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None])
        most = now
    if splits == 1:
        out_at = (row * kv_heads * group + kv_head * group + heads[:, None]) * dim + at[None, :]
        tl.store(out + out_at, acc / total[:, None], mask=real)
    else:
        place = ((row * kv_heads + kv_head) * splits + part) * group + heads
        tl.store(partial + place[:, None] * dim + at[None, :], acc, mask=real)
        tl.store(sums + place * 2, most, mask=heads < group)
        tl.store(sums + place * 2 + 1, total, mask=heads < group)


@triton.jit
def _merge_parts(partial, sums, out, splits: tl.constexpr, group: tl.constexpr, dim: tl.constexpr):
    kv_head, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.arange(0, splits)
    at = tl.arange(0, dim)
    place = (kv_head * splits + parts) * group + head
    most = tl.load(sums + place * 2)
    total = tl.load(sums + place * 2 + 1)
    weight = tl.exp2(most - tl.max(most, axis=0))
    acc = tl.load(partial + place[:, None] * dim + at[None, :])
    merged = tl.sum(acc * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(out + (kv_head * group + head) * dim + at, merged)


def num_splits(rows: int, kv_heads: int) -> int:
    """A power of two that gives about `PROGRAMS_WANTED` programs."""
    wanted = max(1, PROGRAMS_WANTED // (rows * kv_heads))
    return min(MAX_SPLITS, 1 << (wanted.bit_length() - 1))


def decode_attention(
    q: Tensor,
    pool: KvPool,
    layer: int,
    contexts: Tensor,
    page_table: Tensor,
    window: int | None,
    splits: int = 0,
) -> Tensor:
    """Attends from the last position of each row.

    Args:
        q: [B, Hq, D], rows any distance apart.
        pool: holds K and V of all positions, the new ones included.
        layer: of the pool.
        contexts: [B] int32, positions of each row, at least 1.
        page_table: [B, P] int32.
        window: positions seen, the row's own included; None: all.
        splits: parts of a row's context, a power of two; 0: what `num_splits` says.

    Returns:
        [B, Hq, D]
    """
    rows, heads, dim = q.shape
    kv_heads = pool.tensor.shape[1]
    splits = splits or num_splits(rows, kv_heads)
    group = heads // kv_heads
    strides = pool.tensor.stride()
    out = q.new_empty(rows, heads, dim)
    parts = rows * kv_heads * splits * group if splits > 1 else 0
    partial = torch.empty(parts, dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(parts, 2, dtype=torch.float32, device=q.device)
    launch(
        _attend_part,
        (rows, kv_heads, splits),
        q,
        pool.tensor,
        contexts,
        page_table,
        partial,
        sums,
        out,
        dim**-0.5 * 1.4426950408889634,
        strides[0],
        strides[1],
        layer * strides[2],
        page_table.shape[1],
        q.stride(0),
        1 << 30 if window is None else window,
        splits,
        group,
        max(MIN_GROUP, triton.next_power_of_2(group)),
        dim,
        pool.page_size,
        BLOCK_TOKENS,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    if splits > 1:
        launch(_merge_parts, (rows * kv_heads, group), partial, sums, out, splits, group, dim)
    return out
