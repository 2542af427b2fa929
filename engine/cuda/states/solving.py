"""What a piece of a prompt adds to the state of a delta rule, but for what it finds there.

Each token's value is corrected by those before it in the piece, which is a triangular system
(Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule", the WY form):

    (1 + A) u = beta * v        A[i, j] = beta[i] * k[i] . k[j] * what is left at i of j,  j < i
    (1 + A) w = beta * faded * k

The inverse of 1 + A is made of those of its blocks on the diagonal, of twice the size in each turn:
in two blocks, ((T, 0), (-U L T, U)) where T and U are inverses and L lies below. That loses nothing
where keys are alike, as powers of A would.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, power_of_2
from engine.cuda.states.folding import Solved
from engine.cuda.states.layout import LEAST_TILE, Shape
from engine.cuda.states.mixing import Mixed
from engine.model.mixers.config import GRID


@triton.jit
def _solve(
    mixed, fadeds, seconds, u, w, chunks,
    heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, k_channel: tl.constexpr,
    v_channel: tl.constexpr, channels: tl.constexpr, grid: tl.constexpr, keys: tl.constexpr,
    values: tl.constexpr,
):  # fmt: skip
    number, all_heads = tl.program_id(0), tl.num_programs(0)
    chunk = chunks + tl.program_id(1) * 5
    count = tl.load(chunk + 2)
    if count == 0:
        return
    first = tl.load(chunk + 1)
    units = all_heads // heads
    unit, head = number // heads, number % heads
    token = tl.arange(0, grid)
    inside = token < count
    tokens = (first + token).to(tl.int64)
    key, value = tl.arange(0, keys), tl.arange(0, values)
    of_key = inside[:, None] & (key < key_dim)[None, :]
    of_value = inside[:, None] & (value < value_dim)[None, :]
    source = mixed + (tokens * units + unit)[:, None] * channels
    k = tl.load(source + (k_channel + key)[None, :], mask=of_key, other=0.0)
    faded = tl.load(fadeds + tokens * all_heads + number, mask=inside, other=0.0)
    faded = tl.where(inside, faded, tl.min(faded))
    beta = tl.load(seconds + tokens * all_heads + number, mask=inside, other=0.0)
    row, column = token[:, None], token[None, :]
    left = tl.exp(tl.where(row > column, faded[:, None] - faded[None, :], float("-inf")))
    below = tl.dot(k, tl.trans(k)) * left * beta[:, None]
    inverse = tl.where(row == column, 1.0, 0.0)
    inverse -= tl.where(row // 2 == column // 2, below, 0.0)
    for power in tl.static_range(1, 6):
        one, two = row >> power, column >> power
        joins = (one // 2 == two // 2) & (one != two)
        part = tl.dot(tl.where(joins, below, 0.0), inverse)
        inverse -= tl.dot(inverse, part)
    dtype: tl.constexpr = mixed.dtype.element_ty
    inverse = inverse.to(dtype)
    looked_up = k.to(tl.float32) * (beta * tl.exp(faded))[:, None]
    place = (tokens * all_heads + number)[:, None]
    looked_up = tl.dot(inverse, looked_up.to(dtype))
    tl.store(w + place * key_dim + key[None, :], looked_up, mask=of_key)
    v = tl.load(source + (v_channel + head * value_dim + value)[None, :], mask=of_value, other=0.0)
    added = tl.dot(inverse, (v.to(tl.float32) * beta[:, None]).to(dtype))
    tl.store(u + place * value_dim + value[None, :], added, mask=of_value)


def solve(mixed: Mixed, shape: Shape, chunks: Tensor) -> Solved:
    """u and w of all tokens. `chunks`: see `engine.cuda.states.chunks`."""
    tokens, units, channels = mixed.inputs.shape
    heads = units * shape.heads
    solved = Solved(
        mixed.inputs.new_empty(tokens, heads, shape.value_dim),
        mixed.inputs.new_empty(tokens, heads, shape.key_dim),
    )
    keys, values = (power_of_2(dim) for dim in (shape.key_dim, shape.value_dim))
    launch(
        _solve,
        (heads, len(chunks)),
        mixed.inputs,
        mixed.faded,
        mixed.second,
        *solved,
        chunks,
        shape.heads,
        shape.key_dim,
        shape.value_dim,
        shape.k_channel,
        shape.v_channel,
        channels,
        GRID,
        max(LEAST_TILE, keys),
        max(LEAST_TILE, values),
        num_warps=4,
    )
    return solved
