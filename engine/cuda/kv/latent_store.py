"""The store of latents in one pass: norms a latent, rotates the part of K beside it and that of q,
and stores latent and part in the pool.

All arithmetic is float32. A value is rounded at the same places as in `engine.model.mixers.latent`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.cuda.kv.rope_store import HEADS_AT_ONCE, RopeTable
from engine.model.linear import RmsNorm
from engine.pool.kv_pool import KvPool


@triton.jit
def _turned(source, angle, at, exists, one, two, half: tl.constexpr):
    """Two numbers of each pair of `source`, rotated, in its dtype."""
    dtype: tl.constexpr = source.dtype.element_ty
    first = tl.load(source + one, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(source + two, mask=exists, other=0.0).to(tl.float32)
    cos = tl.load(angle + at, mask=at < half, other=1.0).to(tl.float32)
    sin = tl.load(angle + half + at, mask=at < half, other=0.0).to(tl.float32)
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _latent_store(
    kept, q, weight, eps, rope, positions, stores, pool, page_stride, layer_offset,
    rank: tl.constexpr, padded_rank: tl.constexpr, half: tl.constexpr, padded: tl.constexpr,
    neighbours: tl.constexpr, heads: tl.constexpr, head_dim: tl.constexpr,
    page_size: tl.constexpr, pdl: tl.constexpr, head_block: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    dim: tl.constexpr = rank + 2 * half
    at = tl.arange(0, padded)
    one, two = at, half + at
    if neighbours:
        one, two = 2 * at, 2 * at + 1
    angle = rope + tl.load(positions + token).to(tl.int64) * (2 * half)
    if tl.program_id(1) == 0:
        place = tl.load(stores + token).to(tl.int64)
        target = pool + (place // page_size) * page_stride + layer_offset
        target += (place % page_size) * dim
        source = kept + token * dim
        numbers = tl.arange(0, padded_rank)
        there = numbers < rank
        x = tl.load(source + numbers, mask=there, other=0.0).to(tl.float32)
        gain = tl.load(weight + numbers, mask=there, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / rank + eps) * gain
        x = x.to(kept.dtype.element_ty)
        tl.store(source + numbers, x, mask=there)
        tl.store(target + numbers, x, mask=there)
        exists = at < half
        first, second = _turned(source + rank, angle, at, exists, one, two, half)
        tl.store(source + rank + one, first, mask=exists)
        tl.store(source + rank + two, second, mask=exists)
        tl.store(target + rank + one, first, mask=exists)
        tl.store(target + rank + two, second, mask=exists)
    else:
        head = (tl.program_id(1) - 1) * head_block + tl.arange(0, head_block)
        paired = (head < heads)[:, None] & (at < half)[None, :]
        row = q + (token * heads + head[:, None]) * head_dim + head_dim - 2 * half
        low, high = _turned(row, angle, at[None, :], paired, one[None, :], two[None, :], half)
        tl.store(row + one[None, :], low, mask=paired)
        tl.store(row + two[None, :], high, mask=paired)


def latent_store(
    kept: Tensor,
    q: Tensor | None,
    norm: RmsNorm,
    rope: RopeTable,
    positions: Tensor,
    stores: Tensor,
    pool: KvPool,
    layer: int,
    heads: int,
) -> None:
    """Norms and rotates `kept` in place and stores it, and rotates q in place.

    Args:
        kept: [T, C + R], contiguous: latents, and the part of K that is rotated.
        q: [T, Hq * (N + R)], contiguous; None: there is none.
        norm: of latents.
        rope: cos and sin of R numbers.
        positions: [T] int32.
        stores: [T] int32, page * page_size + offset of each token.
        pool: the pool for latents.
        layer: layer of the pool.
        heads: Hq, 0 without q.
    """
    half = rope.angles.shape[1] // 2
    rank = kept.shape[1] - 2 * half
    launch(
        _latent_store,
        (len(kept), 1 + pieces_of(heads, HEADS_AT_ONCE)),
        kept,
        kept if q is None else q,
        norm.weight,
        norm.eps,
        rope.angles,
        positions,
        stores,
        pool.elements,
        pool.page_stride,
        layer * pool.layer_stride,
        rank,
        power_of_2(rank),
        half,
        power_of_2(half),
        rope.neighbours,
        heads,
        0 if q is None else q.shape[1] // heads,
        pool.page_size,
        early(),
        HEADS_AT_ONCE,
        launch_pdl=early(),
    )
