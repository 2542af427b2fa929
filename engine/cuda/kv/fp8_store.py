"""Rope and the KV store in FP8. K and V are rounded as `engine.pool.fp8_rounding` says.

The rounded K and V also replace those that fresh prompts attend to. So every path sees the same
numbers, and no pass of its own rounds them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, pieces_of
from engine.cuda.kv.rope_store import HEADS_AT_ONCE, HeadNorms, RopeTable, rotated
from engine.pool.fp8_rounding import EXPONENTS
from engine.pool.kv_pool import KvPool


@triton.jit
def _exponents(first, second, least: tl.constexpr, most: tl.constexpr):
    """int32 exponents of rows in two halves, [heads, half] float32 each."""
    # As integers, magnitudes have the same order, and NaN is the largest.
    bits = tl.maximum(
        first.to(tl.int32, bitcast=True) & 0x7FFFFFFF,
        second.to(tl.int32, bitcast=True) & 0x7FFFFFFF,
    )
    bits = tl.max(bits, axis=1)
    found = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    found = tl.where(bits > 0, tl.minimum(tl.maximum(found, least), most), 0)
    return tl.where(bits < 0x7F800000, found, -128)


@triton.jit
def power_of_two(exponents):
    """2**e of int32 exponents in [-126, 127]; -inf for the exponent of rows that are no number."""
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x, exponents):
    """e4m3 values of rows [heads, half], float32."""
    exponents = exponents[:, None]
    scaled = tl.minimum(tl.maximum(x * power_of_two(-exponents), -448.0), 448.0)
    return tl.where(exponents == -128, 0.0, scaled).to(tl.float8e4nv)


@triton.jit
def _round_heads(first, second, keeps, least: tl.constexpr, most: tl.constexpr):
    """For heads in two halves: exponents, values, and the halves as they will be read, where the
    pool keeps them."""
    wide, wide2 = first.to(tl.float32), second.to(tl.float32)
    found = _exponents(wide, wide2, least, most)
    rounded, rounded2 = _rounded(wide, found), _rounded(wide2, found)
    scale = power_of_two(found)[:, None]
    first = tl.where(keeps, (rounded.to(tl.float32) * scale).to(first.dtype), first)
    second = tl.where(keeps, (rounded2.to(tl.float32) * scale).to(second.dtype), second)
    return found, rounded, rounded2, first, second


@triton.jit
def _rope_store_fp8(
    qkv,
    rope,
    positions,
    stores,
    values,
    exponents,
    q_weight,
    k_weight,
    eps,
    page_stride,
    head_stride,
    layer_offset,
    exponents_offset,
    least: tl.constexpr,
    most: tl.constexpr,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    turned: tl.constexpr,
    padded: tl.constexpr,
    neighbours: tl.constexpr,
    page_size: tl.constexpr,
    head_norms: tl.constexpr,
    v_norm: tl.constexpr,
    head_block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * head_block + tl.arange(0, head_block)
    first, second, one, two, source, exists, _ = rotated(
        qkv,
        rope,
        tl.load(positions + token),
        q_weight,
        k_weight,
        eps,
        token,
        heads,
        num_heads,
        num_kv_heads,
        half,
        turned,
        padded,
        neighbours,
        head_norms,
        v_norm,
    )
    keeps = exists & (heads >= num_heads)[:, None]
    found, rounded, rounded2, first, second = _round_heads(first, second, keeps, least, most)
    tl.store(source + one, first, mask=exists)
    tl.store(source + two, second, mask=exists)
    place = tl.load(stores + token).to(tl.int64)
    slot = place % page_size
    is_value = heads >= num_heads + num_kv_heads
    kv_head = heads.to(tl.int64) - num_heads - tl.where(is_value, num_kv_heads, 0)
    head = (place // page_size) * page_stride + kv_head * head_stride
    # K has a token's numbers side by side, V has its tokens side by side.
    step = tl.where(is_value, page_size, 1)[:, None]
    start = tl.where(is_value, page_size * 2 * half + slot, slot * 2 * half)
    target = (head + layer_offset + start)[:, None]
    tl.store(values + target + one * step, rounded, mask=keeps)
    tl.store(values + target + two * step, rounded2, mask=keeps)
    target = head + exponents_offset + tl.where(is_value, page_size, 0) + slot
    kept = (heads >= num_heads) & (heads < num_heads + 2 * num_kv_heads)
    tl.store(exponents + target, found.to(tl.int8), mask=kept)


def rope_store_fp8(
    qkv: Tensor,
    rope: RopeTable,
    positions: Tensor,
    stores: Tensor,
    pool: KvPool,
    layer: int,
    norms: HeadNorms | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope_store` over a pool in FP8. k and v are rounded in place, too."""
    pool, layer = pool.band_of(layer)
    kv_heads, dim = pool.num_kv_heads, pool.head_dim
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q_weight, k_weight, eps, norms_v = norms or HeadNorms(rope.angles, rope.angles, 0.0)
    grid = (len(qkv), pieces_of(heads + 2 * kv_heads, HEADS_AT_ONCE))
    launch(
        _rope_store_fp8,
        grid,
        qkv,
        rope.angles,
        positions,
        stores,
        pool.elements,
        pool.data.view(torch.int8),
        q_weight,
        k_weight,
        eps,
        pool.page_stride,
        pool.head_stride,
        layer * pool.layer_stride,
        pool.head_values + layer * 2 * pool.page_size,
        *EXPONENTS[pool.dtype],
        heads,
        kv_heads,
        *rope.pairs(dim),
        pool.page_size,
        norms is not None,
        norms_v,
        HEADS_AT_ONCE,
    )
    q, k, v = qkv.view(len(qkv), -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v
