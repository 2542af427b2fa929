"""Rope and the KV store in one pass: normalises and rotates q and k, and stores k and v.

All arithmetic is float32. A value is rounded at the same places as in `engine.model.decoder`.
Offsets into the KV pool are 64 bits wide, because a pool passes 2**31 elements within its first
thousand pages.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.kernels import launch, power_of_2
from engine.pool.kv_pool import KvPool

HEADS_AT_ONCE = 8
"""Heads of a program: a token of a model with grouped queries takes a few programs."""


class HeadNorms(NamedTuple):
    """RMS norm over each head of q and k, before rope."""

    q_weight: Tensor
    """[D]"""
    k_weight: Tensor
    eps: float
    norms_v: bool = False
    """v is normed, too, without a weight."""


@triton.jit
def rotated(
    qkv,
    rope,
    position,
    q_weight,
    k_weight,
    eps,
    token,
    heads,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    turned: tl.constexpr,
    padded: tl.constexpr,
    neighbours: tl.constexpr,
    head_norms: tl.constexpr,
    v_norm: tl.constexpr,
):
    """Some heads of a token in pairs of numbers that are rotated together, [heads, padded] each,
    rounded to the dtype of `qkv`; where the pairs lie in a head, [1, padded] each; where the heads
    come from, [heads, 1]; which pairs exist; which heads are rotated, [heads, 1].

    A head has `half` pairs. The first `turned` of them are rotated, and lie before the others: as
    `neighbours`, or as two halves.
    """
    all_heads: tl.constexpr = num_heads + 2 * num_kv_heads
    at = tl.arange(0, padded)[None, :]
    one, two = at, half + at
    if turned != half:
        one = tl.where(at < turned, at, turned + at)
        two = tl.where(at < turned, turned + at, half + at)
    if neighbours:
        one = tl.where(at < turned, 2 * at, one)
        two = tl.where(at < turned, 2 * at + 1, two)
    exists = (heads < all_heads)[:, None]
    if padded != half:
        exists = exists & (at < half)
    rotates = (heads < num_heads + num_kv_heads)[:, None]
    source = qkv + (token * all_heads + heads[:, None]) * (2 * half)
    first = tl.load(source + one, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(source + two, mask=exists, other=0.0).to(tl.float32)
    dtype: tl.constexpr = qkv.dtype.element_ty
    if head_norms:
        power = tl.sum(first * first + second * second, axis=1)[:, None]
        scale = tl.rsqrt(power / (2 * half) + eps)
        if not v_norm:
            scale = tl.where(rotates, scale, 1.0)
        is_q = exists & (heads < num_heads)[:, None]
        for_k = exists & rotates & (heads >= num_heads)[:, None]
        gain = tl.load(q_weight + one + 0 * heads[:, None], mask=is_q, other=1.0).to(tl.float32)
        gain2 = tl.load(q_weight + two + 0 * heads[:, None], mask=is_q, other=1.0)
        k_gain = tl.load(k_weight + one + 0 * heads[:, None], mask=for_k, other=1.0)
        k_gain2 = tl.load(k_weight + two + 0 * heads[:, None], mask=for_k, other=1.0)
        first = (first * scale * gain * k_gain.to(tl.float32)).to(dtype).to(tl.float32)
        second = (second * scale * gain2.to(tl.float32) * k_gain2.to(tl.float32)).to(dtype)
        second = second.to(tl.float32)
    angle = rope + position.to(tl.int64) * (2 * half) + at
    if padded != half:
        cos = tl.where(rotates, tl.load(angle, mask=at < half, other=1.0).to(tl.float32), 1.0)
        sin = tl.load(angle + half, mask=at < half, other=0.0).to(tl.float32)
        sin = tl.where(rotates, sin, 0.0)
    else:
        cos = tl.where(rotates, tl.load(angle).to(tl.float32), 1.0)
        sin = tl.where(rotates, tl.load(angle + half).to(tl.float32), 0.0)
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)
    return rotated_first, rotated_second, one, two, source, exists, rotates


@triton.jit
def _rope_store(
    qkv,
    rope,
    positions,
    stores,
    pool,
    q_weight,
    k_weight,
    eps,
    page_stride,
    head_stride,
    layer_offset,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    turned: tl.constexpr,
    padded: tl.constexpr,
    neighbours: tl.constexpr,
    page_size: tl.constexpr,
    head_norms: tl.constexpr,
    v_norm: tl.constexpr,
    pdl: tl.constexpr,
    head_block: tl.constexpr,
):
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * head_block + tl.arange(0, head_block)
    rotated_first, rotated_second, one, two, source, exists, rotates = rotated(
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
    changes = exists & (rotates | v_norm)
    tl.store(source + one, rotated_first, mask=changes)
    tl.store(source + two, rotated_second, mask=changes)
    kept = heads - num_heads
    place = tl.load(stores + token).to(tl.int64)
    is_value = (kept >= num_kv_heads).to(tl.int64)
    kv_head = kept.to(tl.int64) - is_value * num_kv_heads
    target = (place // page_size) * page_stride + kv_head * head_stride + layer_offset
    target += (is_value * page_size + place % page_size) * (2 * half)
    target = pool + target[:, None]
    keeps = exists & (kept >= 0)[:, None]
    tl.store(target + one, rotated_first, mask=keeps)
    tl.store(target + two, rotated_second, mask=keeps)


class RopeTable(NamedTuple):
    """What a layer rotates by."""

    angles: Tensor
    """[positions, D]: cos of the D / 2 pairs, then sin; those that are not rotated are 1 and 0."""
    turned: int
    """Pairs that are rotated."""
    neighbours: bool = False
    """See `engine.model.mixers.rope.Rope`."""

    def pairs(self, dim: int) -> tuple[int, int, int, bool]:
        """Pairs of a head, those that are rotated (all, if none is), a power of two, and whether
        they are neighbours."""
        half = dim // 2
        return half, self.turned or half, power_of_2(half), self.neighbours


def rope_store(
    qkv: Tensor,
    rope: RopeTable,
    positions: Tensor,
    stores: Tensor,
    pool: KvPool,
    layer: int,
    norms: HeadNorms | None,
    *,
    keeps: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises (if the model does) and rotates q and k in place. Stores k and v in the pool.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D], contiguous.
        rope: cos and sin.
        positions: [T] int32.
        stores: [T] int32, page * page_size + offset of each token.
        pool: the pool for k and v.
        layer: layer of the pool.
        norms: None if the model has none.
        keeps: there are K and V; else `qkv` has q alone, and nothing is stored.

    Returns:
        q [T, Hq, D], k and v [T, Hkv, D], views of `qkv`.
    """
    pool, layer = pool.band_of(layer)
    kv_heads, dim = pool.num_kv_heads if keeps else 0, pool.head_dim
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q_weight, k_weight, eps, norms_v = norms or HeadNorms(rope.angles, rope.angles, 0.0)
    tokens = qkv.shape[0]
    grid = (tokens, -(-(heads + 2 * kv_heads) // HEADS_AT_ONCE))
    launch(
        _rope_store,
        grid,
        qkv,
        rope.angles,
        positions,
        stores,
        pool.elements,
        q_weight,
        k_weight,
        eps,
        pool.page_stride,
        pool.head_stride,
        layer * pool.layer_stride,
        heads,
        kv_heads,
        *rope.pairs(dim),
        pool.page_size,
        norms is not None,
        norms_v,
        early(),
        HEADS_AT_ONCE,
        launch_pdl=early(),
    )
    q, k, v = qkv.view(tokens, -1, dim).split((heads, kv_heads, kv_heads), dim=1)
    return q, k, v
