"""Attention of prompts over pages of latents, absorbed: what `engine.cuda.kv.latent_decode` does
for decode rows, for rows of any number of new tokens.

A program takes some queries of a row, tokens and heads side by side, and reads all that they see.
Against K and V of heads that are made first it does three times the arithmetic for each token seen,
and makes nothing. So it pays for short chunks behind long contexts.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.attention.latents import MOST_QUERIES
from engine.cuda.decode_attention import LOG2_E, MIN_QUERIES
from engine.cuda.early import early
from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.pool.kv_pool import KvPool
from engine.step.attention import AttentionSpec

BLOCK, WARPS, STAGES = 32, 8, 2
"""Tokens of a round, and how they are read. Not tuned."""


@triton.jit(do_not_specialize=["table_width"])
def _attend_latent_prompt(
    q, pool, starts, contexts, page_table, out, scale, page_stride, layer_offset, table_width,
    heads: tl.constexpr, queries: tl.constexpr, rank: tl.constexpr, padded_rank: tl.constexpr,
    turned: tl.constexpr, padded_turned: tl.constexpr, page_size: tl.constexpr,
    pdl: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row, some = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim: tl.constexpr = rank + turned
    begin, new = tl.load(starts + row), tl.load(starts + row + 1)
    new = new - begin
    if some * queries >= new * heads:
        return
    context = tl.load(contexts + row)
    at_query = some * queries + tl.arange(0, queries)
    column, head = at_query // heads, at_query % heads
    real = column < new
    # The last query's tokens bound what the program reads.
    last = tl.minimum((some * queries + queries - 1) // heads, new - 1)
    end = context - new + last + 1
    at, beside = tl.arange(0, padded_rank), tl.arange(0, padded_turned)
    place = (begin + column).to(tl.int64) * heads + head
    source = q + place[:, None] * dim
    of_latent = real[:, None] & (at < rank)[None, :]
    of_turned = real[:, None] & (beside < turned)[None, :]
    query = tl.load(source + at[None, :], mask=of_latent, other=0.0)
    turned_query = tl.load(source + rank + beside[None, :], mask=of_turned, other=0.0)
    most = tl.full((queries,), float("-inf"), tl.float32)
    total = tl.zeros((queries,), tl.float32)
    acc = tl.zeros((queries, padded_rank), tl.float32)
    tokens = tl.arange(0, block)
    own = context - new + column
    for start in tl.range(0, end, block):
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
        shown = seen[None, :] & (position[None, :] <= own[:, None])
        logits = tl.where(shown, logits, float("-inf"))
        # Every query sees the first token, so the largest is a number from the first round on.
        now = tl.maximum(most, tl.max(logits, axis=1))
        kept = tl.exp2(most - now)
        weights = tl.exp2(logits - now[:, None])
        total = total * kept + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * kept[:, None])
        most = now
    tl.store(out + place[:, None] * rank + at[None, :], acc / total[:, None], mask=of_latent)


def prompt_latents(
    q: Tensor,
    pool: KvPool,
    layer: int,
    query_starts: Tensor,
    max_query: int,
    contexts: Tensor,
    page_table: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """Attends from the new tokens of each row.

    Args:
        q: [T, Hq, C + R], contiguous: absorbed queries.
        pool: holds the latents of all positions, with the new ones.
        layer: layer of the pool.
        query_starts: [rows + 1] int32, where each row's tokens begin in `q`.
        max_query: most new tokens of a row.
        contexts: [rows] int32, positions of each row.
        page_table: [rows, P] int32.
        spec: of the layer.

    Returns:
        [T, Hq, C], sums of latents by weights of the heads.
    """
    assert spec.latents is not None, "the layer keeps latents"
    tokens, heads, dim = q.shape
    rank = spec.latents.weight.shape[2]
    out = q.new_empty(tokens, heads, rank)
    launch(
        _attend_latent_prompt,
        (len(contexts), pieces_of(max_query * heads, MOST_QUERIES)),
        q,
        pool.elements,
        query_starts,
        contexts,
        page_table,
        out,
        spec.scale * LOG2_E,
        pool.page_stride,
        layer * pool.layer_stride,
        page_table.shape[1],
        heads,
        MOST_QUERIES,
        rank,
        power_of_2(rank),
        dim - rank,
        max(MIN_QUERIES, power_of_2(dim - rank)),
        pool.page_size,
        early(),
        BLOCK,
        num_warps=WARPS,
        num_stages=STAGES,
        launch_pdl=early(),
    )
    return out
