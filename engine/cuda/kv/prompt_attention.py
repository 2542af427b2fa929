"""Attention of prompt rows over the paged pool, with windows, soft caps and sinks, for heads of any
width (Dao 2023, over pages).

A program takes some new tokens of a row and one query head, and goes through the tokens that they
see, from the first in the window to the last of its own. The pool has the step's own K and V.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.decode_attention import capped, features_of, seen_by
from engine.cuda.kernels import launch, power_of_2
from engine.pool.kv_pool import KvPool
from engine.step.attention import AttentionSpec


class PromptTiles(NamedTuple):
    """What a program reads at once."""

    queries: int
    keys: int
    warps: int
    stages: int


NARROW, WIDE = PromptTiles(128, 64, 8, 2), PromptTiles(64, 32, 4, 2)
WIDEST = PromptTiles(64, 32, 8, 2)
"""For heads of up to 128 numbers, of up to 256, and of up to 512: there the tiles of a program take
192 KiB, and all registers. Not measured on a GPU yet."""


@triton.jit
def _begun(sinks, head, queries: tl.constexpr, has_sinks: tl.constexpr):
    """The largest logit and the sum before any key: those of the head's sink, or nothing."""
    total = tl.zeros((queries,), tl.float32)
    most = tl.full((queries,), float("-inf"), tl.float32)
    if has_sinks:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        most = tl.zeros((queries,), tl.float32) + sink
        total += 1.0
    return most, total


@triton.jit
def _weighed(logits, most):
    """The new largest logit, what is kept of the sums so far, and the weights. A row that has seen
    nothing yet has no reference: any finite one will do."""
    now = tl.maximum(most, tl.max(logits, axis=1))
    reference = tl.where(now == float("-inf"), 0.0, now)
    return now, tl.exp2(most - reference), tl.exp2(logits - reference[:, None])


@triton.jit(do_not_specialize=["table_width", "window"])
def _attend_prompt(
    q,
    pool,
    query_starts,
    contexts,
    page_table,
    out,
    sinks,
    scale,
    cap,
    page_stride,
    head_stride,
    layer_offset,
    table_width,
    q_row_stride,
    window,
    heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    page_size: tl.constexpr,
    caps: tl.constexpr,
    has_sinks: tl.constexpr,
    queries: tl.constexpr,
    keys: tl.constexpr,
):
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    first_query = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - first_query
    begin = tl.program_id(0) * queries
    if begin >= count:
        return
    context = tl.load(contexts + row)
    new = begin + tl.arange(0, queries)
    position = context - count + new
    at = tl.arange(0, padded_dim)
    there = (new < count)[:, None] & (at < dim)[None, :]
    token = (first_query + new).to(tl.int64)
    query = tl.load(
        q + token[:, None] * q_row_stride + head * dim + at[None, :], mask=there, other=0.0
    )
    most, total = _begun(sinks, head, queries, has_sinks)
    acc = tl.zeros((queries, padded_dim), tl.float32)
    base = pool + layer_offset + (head // group).to(tl.int64) * head_stride
    start = tl.maximum(context - count + begin + 1 - window, 0) // keys * keys
    end = tl.minimum(context - count + begin + queries, context)
    for block in tl.range(start, end, keys):
        seen = block + tl.arange(0, keys)
        real = seen < end
        page = tl.load(page_table + row * table_width + seen // page_size, mask=real, other=0)
        places = base + page.to(tl.int64) * page_stride + (seen % page_size) * dim
        read = real[:, None] & (at < dim)[None, :]
        k = tl.load(places[:, None] + at[None, :], mask=read, other=0.0)
        v = tl.load(places[:, None] + page_size * dim + at[None, :], mask=read, other=0.0)
        logits = tl.dot(query, k.T) * scale
        if caps:
            logits = capped(logits, cap)
        visible = (seen[None, :] <= position[:, None]) & real[None, :]
        visible &= seen[None, :] > position[:, None] - window
        logits = tl.where(visible, logits, float("-inf"))
        now, kept, weights = _weighed(logits, most)
        total = total * kept + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * kept[:, None])
        most = now
    # Padding may see nothing. It is finite all the same.
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(out + (token[:, None] * heads + head) * dim + at[None, :], result, mask=there)


def prompt_attention(
    q: Tensor,
    pool: KvPool,
    layer: int,
    query_starts: Tensor,
    max_query: int,
    contexts: Tensor,
    page_table: Tensor,
    spec: AttentionSpec,
) -> Tensor:
    """Attends causally from the last positions of each row.

    Args:
        q: [T, Hq, D], with any stride between tokens.
        pool: holds K and V of all positions, with the new ones.
        layer: layer of the pool.
        query_starts: [R + 1] int32, the start of each row's tokens.
        max_query: most new tokens of a row.
        contexts: [R] int32, positions of each row.
        page_table: [R, P] int32.
        spec: of the layer.

    Returns:
        [T, Hq, D]
    """
    pool, layer = pool.band_of(layer)
    tokens, heads, dim = q.shape
    tiles = NARROW if dim <= 128 else WIDE if dim <= 256 else WIDEST
    out = q.new_empty(tokens, heads, dim)
    seen = seen_by(spec)
    grid = (-(-max_query // tiles.queries), heads, len(contexts))
    launch(
        _attend_prompt,
        grid,
        q,
        pool.elements,
        query_starts,
        contexts,
        page_table,
        out,
        *features_of(spec, q),
        pool.page_stride,
        pool.head_stride,
        layer * pool.layer_stride,
        page_table.shape[1],
        q.stride(0),
        seen,
        heads,
        heads // pool.num_kv_heads,
        dim,
        power_of_2(dim),
        pool.page_size,
        spec.soft_cap is not None,
        spec.sinks is not None,
        tiles.queries,
        tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
