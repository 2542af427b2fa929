"""Attention of decode rows over the paged pool: few new tokens a row, split along the context.

This is flash decoding (Dao et al. 2023) for pages. A program takes one KV head of one row and a
part of its context, or all of it. All query heads of the KV head share the loads, and so do all new
tokens of the row, each of which sees what is before it. A second kernel merges the parts. Long
contexts have more parts than short ones, so that the device does not wait for one row
(`engine.attention.parts`). The start of a part depends only on the row's own length and on the
batch's division. So within a division a row's result does not depend on the other rows.

Memory is the limit: every byte of K and V is read once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.attention.parts import LEAST_TOKENS_OF_FEW, Division
from engine.cuda.early import early
from engine.cuda.kernels import launch, power_of_2
from engine.pool.kv_pool import KvPool
from engine.step.attention import AttentionSpec

LOG2_E = 1.4426950408889634
MERGE_WARPS = 1
WIDE, MERGED = 128, 2048
"""Heads of more numbers than the first are merged by several programs, each with so many of all
parts as the second, which lie in a warp's registers."""
MIN_QUERIES = 16
"""Rows of the smallest matrix product. The queries of a KV head, one of each of its query heads for
each new token, are padded to this number."""
EVERYTHING = 1 << 30
"""A window that hides nothing."""


@triton.jit
def cut(context, window, splits, least, block: tl.constexpr):
    """The start of a row's first part, and the tokens of each of its parts but the last."""
    first = tl.maximum(context - window, 0) // block * block
    tokens = context - first
    parts = tl.minimum(tl.maximum(tokens // least, 1), splits)
    return first, tl.cdiv(tl.cdiv(tokens, parts), block) * block


@triton.jit
def capped(logits, cap):
    """cap * tanh(logits / cap)."""
    return cap * (2.0 * tl.sigmoid(logits * (2.0 / cap)) - 1.0)


@triton.jit
def begun(
    sinks, kv_head, head, part, group: tl.constexpr, padded: tl.constexpr, has_sinks: tl.constexpr
):
    """The reference and the total of a part's logits, in powers of two, before its first token.
    The first part has the sinks."""
    most = tl.full((padded,), float("-inf"), tl.float32)
    total = tl.zeros((padded,), tl.float32)
    if has_sinks:
        sink = tl.load(sinks + kv_head * group + head)
        most = tl.where(part == 0, sink.to(tl.float32) * 1.4426950408889634, most)
        total = tl.where(part == 0, total + 1.0, total)
    return most, total


@triton.jit
def weighed(logits, most, width: tl.constexpr):
    """The new largest logit, what is kept of the sums so far, and the weights. The first of several
    new tokens may have seen nothing of a part: any finite reference will do for it."""
    now = tl.maximum(most, tl.max(logits, axis=1))
    reference = now
    if width > 1:
        reference = tl.where(now == float("-inf"), 0.0, now)
    return now, tl.exp2(most - reference), tl.exp2(logits - reference[:, None])


@triton.jit
def unseen(logits, position, end, context, window, column, width: tl.constexpr):
    """`logits` [queries, tokens] without those of tokens from `end` on, and of those that a query,
    which is at `column` among its row's new tokens, does not see."""
    if width == 1:
        seen = ((position < end) & (position >= context - window))[None, :]
    else:
        own = (context - width + column)[:, None]
        seen = (position < end)[None, :] & (position[None, :] <= own)
        seen &= position[None, :] > own - window
    return tl.where(seen, logits, float("-inf"))


@triton.jit
def leave(out, partial, sums, place, to, real, rows, acc, most, total, whole: tl.constexpr):
    """Stores the answer if there is one part, else the part. `to` and `real` are [rows, dim],
    `place` and `rows` are [rows]."""
    if whole:
        tl.store(out + to, acc / total[:, None], mask=real)
    else:
        tl.store(partial + to, acc, mask=real)
        tl.store(sums + place * 2, most, mask=rows)
        tl.store(sums + place * 2 + 1, total, mask=rows)


@triton.jit(do_not_specialize=["table_width", "window", "splits", "least"])
def _attend_part(
    q, pool, contexts, page_table, partial, sums, out, sinks, scale, cap,
    page_stride, head_stride, layer_offset, table_width, q_row_stride, window, splits, least,
    whole: tl.constexpr, width: tl.constexpr, group: tl.constexpr, padded: tl.constexpr,
    dim: tl.constexpr, padded_dim: tl.constexpr, page_size: tl.constexpr, caps: tl.constexpr,
    has_sinks: tl.constexpr, pdl: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    context = tl.load(contexts + row)
    first, share = cut(context, window + width - 1, splits, least, block)
    begin = first + part * share
    if begin >= context:
        return
    end = tl.minimum(begin + share, context)
    queries = tl.arange(0, padded)
    column, head = queries // group, queries % group
    at = tl.arange(0, padded_dim)
    real = (queries < width * group)[:, None]
    if padded_dim != dim:
        real = real & (at < dim)[None, :]
    token = row * width + column[:, None]
    q_at = token * q_row_stride + (kv_head * group + head[:, None]) * dim + at[None, :]
    query = tl.load(q + q_at, mask=real, other=0.0)
    most, total = begun(sinks, kv_head, head, part, group, padded, has_sinks)
    acc = tl.zeros((padded, padded_dim), tl.float32)
    base = pool + layer_offset + kv_head.to(tl.int64) * head_stride
    tokens = tl.arange(0, block)
    for start in tl.range(begin, end, block):
        position = start + tokens
        seen = position < end
        page = tl.load(page_table + row * table_width + position // page_size, mask=seen, other=0)
        keys = base + page.to(tl.int64) * page_stride + (position % page_size) * dim
        read = seen[:, None]
        if padded_dim != dim:
            read = read & (at < dim)[None, :]
        k = tl.load(keys[:, None] + at[None, :], mask=read, other=0.0)
        v = tl.load(keys[:, None] + page_size * dim + at[None, :], mask=read, other=0.0)
        logits = tl.dot(query, k.T) * scale
        if caps:
            logits = capped(logits, cap)
        logits = unseen(logits, position, end, context, window, column, width)
        now, kept, weights = weighed(logits, most, width)
        total = total * kept + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None])
        most = now
    place = ((row * kv_heads + kv_head) * splits + part) * (width * group) + queries
    to = place[:, None] * dim + at[None, :]
    if whole:
        to = ((token * kv_heads + kv_head) * group + head[:, None]) * dim + at[None, :]
    leave(out, partial, sums, place, to, real, queries < width * group, acc, most, total, whole)


@triton.jit(do_not_specialize=["window", "splits", "least"])
def _merge_parts(
    partial,
    sums,
    contexts,
    out,
    window,
    splits,
    least,
    kv_heads: tl.constexpr,
    ahead: tl.constexpr,
    padded_splits: tl.constexpr,
    width: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    dims: tl.constexpr,
    pdl: tl.constexpr,
    block: tl.constexpr,
):
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    kv_head, query = tl.program_id(0), tl.program_id(1)
    row = kv_head // kv_heads
    context = tl.load(contexts + row)
    first, share = cut(context, window + width - 1, splits, least, block)
    parts = tl.arange(0, padded_splits)
    there = parts < tl.cdiv(context - first, share)
    read = (parts < splits) if ahead else there  # Ahead: loads do not wait for the row's length.
    at = tl.program_id(2) * dims + tl.arange(0, dims)
    place = (kv_head.to(tl.int64) * splits + parts) * (width * group) + query
    kept = read[:, None]
    if dim % dims != 0:
        kept = kept & (at < dim)[None, :]
    most = tl.load(sums + place * 2, mask=read, other=0.0)
    total = tl.load(sums + place * 2 + 1, mask=read, other=0.0)
    acc = tl.load(partial + place[:, None] * dim + at[None, :], mask=kept, other=0.0)
    most = tl.where(there, most, float("-inf"))
    total = tl.where(there, total, 0.0)
    acc = tl.where(there[:, None], acc, 0.0)
    weight = tl.exp2(most - tl.max(most, axis=0))
    merged = tl.sum(acc * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    token = row * width + query // group
    target = (token * kv_heads + kv_head % kv_heads) * group + query % group
    tl.store(out + target * dim + at, merged, mask=at < dim)


def decode_attention(
    q: Tensor,
    pool: KvPool,
    layer: int,
    contexts: Tensor,
    page_table: Tensor,
    spec: AttentionSpec,
    divided: Division,
) -> Tensor:
    """Attends from the last positions of each row.

    Args:
        q: [B * w, Hq, D], the w new tokens of each row, with any stride between tokens.
        pool: holds K and V of all positions, with the new ones.
        layer: layer of the pool.
        contexts: [B] int32, positions of each row, at least w.
        page_table: [B, P] int32.
        spec: of the layer.
        divided: the division of the contexts.

    Returns:
        [B * w, Hq, D]
    """
    pool, layer = pool.band_of(layer)
    dim, tiles = q.shape[2], divided.tiles
    rows = rows_of(q, contexts, pool.num_kv_heads, dim, spec, divided)
    launch(
        _attend_part,
        rows.grid,
        q,
        pool.elements,
        contexts,
        page_table,
        *rows.room,
        *features_of(spec, q),
        pool.page_stride,
        pool.head_stride,
        layer * pool.layer_stride,
        page_table.shape[1],
        q.stride(0),
        rows.seen,
        *rows.sizes,
        dim,
        power_of_2(dim),
        pool.page_size,
        spec.soft_cap is not None,
        spec.sinks is not None,
        early(),
        tiles.block,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=early(),
    )
    return rows.merged(contexts)


def seen_by(spec: AttentionSpec) -> int:
    """Positions that a query sees, as kernels take them."""
    return EVERYTHING if spec.window is None else spec.window


class Rows(NamedTuple):
    """A call over decode rows: sizes, and memory for the results and for the parts."""

    out: Tensor
    """[B * w, Hq, D]"""
    partial: Tensor
    """[N, D] float32: the sum of each part of a query's context. Empty where there is one part."""
    sums: Tensor
    """[N, 2] float32: two numbers of each part's weights."""
    rows: int
    blocks: int
    """Programs among which the heads of a row are divided."""
    width: int
    """New tokens of a row."""
    group: int
    """Heads of a program."""
    seen: int
    """Positions that a query sees."""
    divided: Division

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs of the first kernel."""
        return self.rows, self.blocks, self.divided.most

    @property
    def room(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where the first kernel writes: `partial, sums, out`."""
        return self.partial, self.sums, self.out

    @property
    def sizes(self) -> tuple[int, int, bool, int, int, int]:
        """The first kernel's `splits, least, whole, width, group, padded`."""
        most, least, _ = self.divided
        return most, least, most == 1, self.width, self.group, self.padded

    @property
    def padded(self) -> int:
        """Queries of a program, up to what a matrix product takes."""
        return max(MIN_QUERIES, power_of_2(self.width * self.group))

    def merged(self, contexts: Tensor) -> Tensor:
        """The results, once the second kernel has merged the parts of every row."""
        (most, least, tiles), dim = self.divided, self.out.shape[2]
        if most == 1:
            return self.out
        parts = power_of_2(most)
        dims = power_of_2(dim)
        dims = dims if dim <= WIDE else min(dims, max(16, MERGED // parts))
        launch(
            _merge_parts,
            (self.rows * self.blocks, self.width * self.group, -(-dim // dims)),
            self.partial,
            self.sums,
            contexts,
            self.out,
            self.seen,
            most,
            least,
            self.blocks,
            least == LEAST_TOKENS_OF_FEW,
            parts,
            self.width,
            self.group,
            dim,
            dims,
            early(),
            tiles.block,
            num_warps=MERGE_WARPS,
            launch_pdl=early(),
        )
        return self.out


def rows_of(
    q: Tensor, contexts: Tensor, blocks: int, dim: int, spec: AttentionSpec, divided: Division
) -> Rows:
    """Takes memory for results of `dim` numbers of each query. See `decode_attention`."""
    (tokens, heads, _), count = q.shape, len(contexts)
    places = 0 if divided.most == 1 else tokens * heads * divided.most
    partial = torch.empty(places, dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(places, 2, dtype=torch.float32, device=q.device)
    out, width, group = q.new_empty(tokens, heads, dim), tokens // count, heads // blocks
    return Rows(out, partial, sums, count, blocks, width, group, seen_by(spec), divided)


def features_of(spec: AttentionSpec, q: Tensor) -> tuple[Tensor, float, float]:
    """Sinks, scale and cap as kernels take them, whose logits are powers of two. `q` stands for
    sinks that are not there."""
    sinks = q if spec.sinks is None else spec.sinks
    return sinks, spec.scale * LOG2_E, (spec.soft_cap or 0.0) * LOG2_E
