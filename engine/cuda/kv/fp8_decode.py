"""Attention of decode rows over a pool in FP8. See `engine.cuda.decode_attention` for the division.

The matrix units take float16, because e4m3 becomes float16 in one instruction a pair. So:

- A head's q is scaled by a power of two, so that its largest number is in [2**14, 2**15). The scale
  comes out of the logits, together with the exponents of K.
- A weight takes the exponent of its V. The reference of the running softmax is then the largest
  *contribution* `logit + exponent of V`, not the largest logit: a weight in float16 is at most 1,
  and what it loses is small beside the sum. The total is kept in float32, without the exponents.
  Merging parts needs just a common reference, so `engine.cuda.decode_attention` does that as well.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.parts import Division
from engine.cuda.decode_attention import (
    begun,
    capped,
    cut,
    features_of,
    leave,
    rows_of,
    unseen,
    weighed,
)
from engine.cuda.kernels import launch
from engine.cuda.kv.fp8_store import power_of_two
from engine.pool.kv_pool import KvPool
from engine.step.attention import AttentionSpec


@triton.jit
def _halved(q, scale):
    """q [heads, dim] in float16, and what each head's logits must be multiplied with, `scale` as
    well."""
    wide = q.to(tl.float32)
    field = tl.max(tl.abs(wide), axis=1).to(tl.int32, bitcast=True) >> 23
    shift = 141 - tl.maximum(field, 15)
    return (wide * power_of_two(shift)[:, None]).to(tl.float16), power_of_two(-shift) * scale


@triton.jit
def _lift(exponent):
    """What an exponent of V adds to a logit. That of no number makes NaN, which shows up in the
    result."""
    return tl.where(exponent == -128, float("nan"), exponent.to(tl.float32))


@triton.jit
def _pages(page_table, position, end, page_size: tl.constexpr):
    """Pages of positions; the scratch page behind the last page of the part."""
    index = position // page_size
    return tl.load(page_table + index, mask=index * page_size < end, other=0)


@triton.jit
def _exponents(exponents, page, position, end, page_stride, page_size: tl.constexpr):
    """int32 exponents of K and of V; 0 behind the end."""
    at = exponents + page.to(tl.int64) * page_stride + position % page_size
    seen = position < end
    k_exponent = tl.load(at, mask=seen, other=0).to(tl.int32)
    return k_exponent, tl.load(at + page_size, mask=seen, other=0).to(tl.int32)


@triton.jit
def _keys_and_values(
    values, page_table, position, end, page_stride, dim: tl.constexpr, page_size: tl.constexpr
):
    """K [tokens, dim] and V [dim, tokens] of positions. A page that is begun is read whole: no
    stored value is a NaN by itself."""
    at, slot = tl.arange(0, dim), position % page_size
    begun = position // page_size * page_size < end
    place = _pages(page_table, position, end, page_size).to(tl.int64) * page_stride
    keys = (values + place + slot * dim)[:, None] + at[None, :]
    turned = (values + place + page_size * dim + slot)[None, :] + at[:, None] * page_size
    k = tl.load(keys, mask=begun[:, None], other=0.0)
    return k, tl.load(turned, mask=begun[None, :], other=0.0)


@triton.jit(do_not_specialize=["table_width", "window", "splits", "least"])
def _attend_part_fp8(
    q, values, exponents, contexts, page_table, partial, sums, out, sinks, scale, cap,
    page_stride, head_stride, layer_offset, exponents_offset, table_width, q_row_stride, window,
    splits, least, whole: tl.constexpr, width: tl.constexpr, group: tl.constexpr,
    padded: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr, caps: tl.constexpr,
    has_sinks: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + row)
    first, share = cut(context, window + width - 1, splits, least, block)
    begin = first + part * share
    if begin >= context:
        return
    end = tl.minimum(begin + share, context)
    queries, at = tl.arange(0, padded), tl.arange(0, dim)[None, :]
    column, head = queries // group, queries % group
    real = queries < width * group
    token = row * width + column[:, None]
    q_at = token * q_row_stride + (kv_head * group + head[:, None]) * dim + at
    query, unscale = _halved(tl.load(q + q_at, mask=real[:, None], other=0.0), scale)
    values += kv_head.to(tl.int64) * head_stride + layer_offset
    exponents += kv_head.to(tl.int64) * head_stride + exponents_offset
    page_table += row * table_width
    position = begin + tl.arange(0, block)
    page = _pages(page_table, position, end, page_size)
    k_exponent, v_exponent = _exponents(exponents, page, position, end, page_stride, page_size)
    page = _pages(page_table, position + block, end, page_size)
    most, total = begun(sinks, kv_head, head, part, group, padded, has_sinks)
    acc = tl.zeros((padded, dim), tl.float32)
    for start in tl.range(begin, end, block):
        position = start + tl.arange(0, block)
        # They are small, so the pipeline leaves them out: those of the next round are read now.
        ahead = position + block
        k_ahead, v_ahead = _exponents(exponents, page, ahead, end, page_stride, page_size)
        page = _pages(page_table, ahead + block, end, page_size)
        k, v = _keys_and_values(values, page_table, position, end, page_stride, dim, page_size)
        scales = unscale[:, None] * power_of_two(k_exponent)[None, :]
        logits = tl.dot(query, k.to(tl.float16).T) * scales
        logits = (capped(logits, cap) if caps else logits) + _lift(v_exponent)[None, :]
        logits = unseen(logits, position, end, context, window, column, width)
        now, kept, weights = weighed(logits, most, width)
        total = total * kept + tl.sum(weights * power_of_two(-v_exponent)[None, :], axis=1)
        acc = tl.dot(weights.to(tl.float16), v.to(tl.float16).T, acc * kept[:, None])
        most, k_exponent, v_exponent = now, k_ahead, v_ahead
    kv_heads = tl.num_programs(1)
    place = ((row * kv_heads + kv_head) * splits + part) * (width * group) + queries
    to = place[:, None] * dim + at
    if whole:
        to = ((token * kv_heads + kv_head) * group + head[:, None]) * dim + at
    leave(out, partial, sums, place, to, real[:, None], real, acc, most, total, whole)


def decode_attention_fp8(
    q: Tensor,
    pool: KvPool,
    layer: int,
    contexts: Tensor,
    page_table: Tensor,
    spec: AttentionSpec,
    divided: Division,
) -> Tensor:
    """`decode_attention` over a pool in FP8."""
    pool, layer = pool.band_of(layer)
    dim, tiles = q.shape[2], divided.tiles
    rows = rows_of(q, contexts, pool.num_kv_heads, dim, spec, divided)
    launch(
        _attend_part_fp8,
        rows.grid,
        q,
        pool.elements,
        pool.data.view(torch.int8),
        contexts,
        page_table,
        *rows.room,
        *features_of(spec, q),
        pool.page_stride,
        pool.head_stride,
        layer * pool.layer_stride,
        pool.head_values + layer * 2 * pool.page_size,
        page_table.shape[1],
        q.stride(0),
        rows.seen,
        *rows.sizes,
        dim,
        pool.page_size,
        spec.soft_cap is not None,
        spec.sinks is not None,
        tiles.block,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return rows.merged(contexts)
