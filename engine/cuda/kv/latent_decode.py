"""Attention of decode rows over pages of latents: absorbed, and split along the context.

Queries are absorbed (`engine.step.attention.Latents`), so all heads of a row read the same latents,
as K and, without the part that is rotated, as V. A program takes some heads of one row, all its new
tokens, and a part of its context. Else it is as `engine.cuda.decode_attention`, whose second kernel
merges the parts.

Memory is the limit up to some 64 queries a row: a latent is read once for all heads of a program,
and programs of the same row find it in the L2 cache.

Shapes: B rows, w new tokens of each, Hq query heads, C numbers of a latent, R rotated ones.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.attention.latents import blocks_of
from engine.attention.parts import Division
from engine.cuda.decode_attention import (
    LOG2_E,
    MIN_QUERIES,
    cut,
    leave,
    rows_of,
    unseen,
    weighed,
)
from engine.cuda.early import early
from engine.cuda.kernels import launch, power_of_2
from engine.pool.kv_pool import KvPool
from engine.step.attention import AttentionSpec

QUERIES_OF_A_WARP: Final = 8
"""So that a warp's part of the sums fits its registers, of which 512 numbers of each query take
half."""


@triton.jit(do_not_specialize=["table_width", "splits", "least"])
def _attend_latents(
    q, pool, contexts, page_table, partial, sums, out, scale, page_stride, layer_offset,
    table_width, splits, least,
    whole: tl.constexpr, width: tl.constexpr, group: tl.constexpr, padded: tl.constexpr,
    rank: tl.constexpr, padded_rank: tl.constexpr, turned: tl.constexpr,
    padded_turned: tl.constexpr, page_size: tl.constexpr, pdl: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row, part_of_heads, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    blocks = tl.num_programs(1)
    dim: tl.constexpr = rank + turned
    context = tl.load(contexts + row)
    _, share = cut(context, 1073741824, splits, least, block)
    begin = part * share
    if begin >= context:
        return
    end = tl.minimum(begin + share, context)
    queries = tl.arange(0, padded)
    column, head = queries // group, queries % group
    real = queries < width * group
    at, beside = tl.arange(0, padded_rank), tl.arange(0, padded_turned)
    token = row * width + column
    source = q + ((token * blocks + part_of_heads) * group + head)[:, None] * dim
    of_latent = real[:, None] & (at < rank)[None, :]
    of_turned = real[:, None] & (beside < turned)[None, :]
    query = tl.load(source + at[None, :], mask=of_latent, other=0.0)
    turned_query = tl.load(source + rank + beside[None, :], mask=of_turned, other=0.0)
    most = tl.full((padded,), float("-inf"), tl.float32)
    total = tl.zeros((padded,), tl.float32)
    acc = tl.zeros((padded, padded_rank), tl.float32)
    tokens = tl.arange(0, block)
    for start in tl.range(begin, end, block):
        position = start + tokens
        seen = position < end
        page = tl.load(page_table + row * table_width + position // page_size, mask=seen, other=0)
        places = pool + layer_offset + page.to(tl.int64) * page_stride
        places += (position % page_size) * dim
        read = seen[:, None] & (at < rank)[None, :]
        latent = tl.load(places[:, None] + at[None, :], mask=read, other=0.0)
        read = seen[:, None] & (beside < turned)[None, :]
        key = tl.load(places[:, None] + rank + beside[None, :], mask=read, other=0.0)
        logits = tl.dot(turned_query, key.T)
        logits = tl.dot(query, latent.T, logits) * scale
        logits = unseen(logits, position, end, context, 1073741824, column, width)
        now, kept, weights = weighed(logits, most, width)
        total = total * kept + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * kept[:, None])
        most = now
    place = ((row * blocks + part_of_heads) * splits + part) * (width * group) + queries
    to = place[:, None] * rank + at[None, :]
    if whole:
        to = ((token * blocks + part_of_heads) * group + head)[:, None] * rank + at[None, :]
    leave(out, partial, sums, place, to, of_latent, real, acc, most, total, whole)


def decode_latents(
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
        q: [B * w, Hq, C + R], contiguous: absorbed queries of the w new tokens of each row.
        pool: holds the latents of all positions, with the new ones.
        layer: layer of the pool.
        contexts: [B] int32, positions of each row, at least w.
        page_table: [B, P] int32.
        spec: of the layer.
        divided: the division of the contexts, of `blocks_of` items a row.

    Returns:
        [B * w, Hq, C], sums of latents by weights of the heads.
    """
    assert spec.latents is not None, "the layer keeps latents"
    dim, rank, tiles = q.shape[2], spec.latents.weight.shape[2], divided.tiles
    blocks = blocks_of(q.shape[1], len(q) // len(contexts))
    rows = rows_of(q, contexts, blocks, rank, spec, divided)
    launch(
        _attend_latents,
        rows.grid,
        q,
        pool.elements,
        contexts,
        page_table,
        *rows.room,
        spec.scale * LOG2_E,
        pool.page_stride,
        layer * pool.layer_stride,
        page_table.shape[1],
        *rows.sizes,
        rank,
        power_of_2(rank),
        dim - rank,
        max(MIN_QUERIES, power_of_2(dim - rank)),
        pool.page_size,
        early(),
        tiles.block,
        num_warps=max(tiles.warps, rows.padded // QUERIES_OF_A_WARP),
        num_stages=tiles.stages,
        launch_pdl=early(),
    )
    return rows.merged(contexts)
