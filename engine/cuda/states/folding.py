"""Prompts folded into states, a piece of 64 tokens at a time.

1. `engine.cuda.states.mixing`: the convolution, norms of q and k, sums of log decays within each
   piece, beta or time steps; and which states are wrong.
2. `engine.cuda.states.solving`, of the delta rule alone: what pieces add, but for the state before.
3. `_fold`: piece after piece into the state, and what comes of each token. A program takes a
   prompt, a head, and some columns of its values.

The chunk rule is that of Yang et al. 2024, "Gated Delta Networks", section 3.3, and of Mamba-2 the
one of Dao and Gu 2024, "Transformers are SSMs", section 6. In a piece, with decays faded[i] from
its begin up to token i:

    change = u - w S                   (of the delta rule; of Mamba-2: dt * x)
    out    = (q S) * faded + (q k^T * left) change
    S      = S * faded[last] + (k * left[last])^T change

Products take numbers in the model's dtype; sums and states are float32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.cuda.states.layout import LEAST_TILE, Kept, Made, Shape, States, Weights
from engine.cuda.states.mixing import Mixed
from engine.cuda.states.parts import source_of
from engine.model.mixers.config import GRID
from engine.pool.state_pool import SPOILT, STAMP_NUMBERS

_SPOILT = tl.constexpr(SPOILT)
_STAMP = tl.constexpr(STAMP_NUMBERS)


class Tiles(NamedTuple):
    """How the kernel that folds is divided."""

    columns: int
    """Columns of values of a program."""
    warps: int
    stages: int
    """Pieces of a prompt that are on their way at once."""


FOLDING: Final = Tiles(64, 4, 2)
"""The fastest of a few for one prompt of 8,192 tokens on an H200, within 3 % (`bench.states`)."""
MANY: Final = 256
"""With more programs of a delta rule than this one stage is faster: 219 us for eight prompts of
1,024 tokens, and 295 with two. Several programs share a processor then."""


class Solved(NamedTuple):
    """See `engine.cuda.states.solving`."""

    values: Tensor
    """[T, U, R, Dv]: u."""
    looked_up: Tensor
    """[T, U, R, Dk]: w."""


@triton.jit
def _keep(
    made, numbers, stamps, old, to, has_old, first, upto, stamp, made_stride,
    unit, q_first, q_stride, k_first, k_stride, v_first, v_stride, shared_by,
    key_dim: tl.constexpr, kernel: tl.constexpr, q_channel: tl.constexpr,
    k_channel: tl.constexpr, v_channel: tl.constexpr, channels: tl.constexpr,
    block: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Writes a unit's stamp, and its last K - 1 inputs before token `upto` of the row."""
    channel = tl.arange(0, block)[:, None]
    at = tl.arange(0, columns)[None, :]
    source = source_of(
        channel, unit, q_first, q_stride, k_first, k_stride, v_first, v_stride, shared_by,
        q_channel, k_channel, v_channel, key_dim,
    )  # fmt: skip
    inside = (channel < channels) & (at < kernel - 1)
    token = upto - (kernel - 1) + at
    new = tl.load(
        made + (first + token).to(tl.int64) * made_stride + source,
        mask=inside & (token >= 0), other=0.0,
    ).to(tl.float32)  # fmt: skip
    earlier = tl.load(
        numbers + old + _STAMP + channel * (kernel - 1) + kernel - 1 + token,
        mask=inside & (token < 0) & (token >= 1 - kernel) & has_old, other=0.0,
    )  # fmt: skip
    tl.debug_barrier()  # Several threads may load the same number.
    value = tl.where(token >= 0, new, earlier)
    tl.store(numbers + to + _STAMP + channel * (kernel - 1) + at, value, mask=inside)
    tl.store(stamps + to, stamp)


@triton.jit
def _through(
    state, mixed, fadeds, seconds, u, w, skips, out, first_token, size, decodes, number, all_heads,
    value,
    is_delta: tl.constexpr, heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    q_channel: tl.constexpr, k_channel: tl.constexpr, v_channel: tl.constexpr,
    channels: tl.constexpr, grid: tl.constexpr, keys: tl.constexpr, values: tl.constexpr,
):  # fmt: skip
    """The state behind a piece, whose tokens' results are stored."""
    dtype: tl.constexpr = mixed.dtype.element_ty
    token, key = tl.arange(0, grid), tl.arange(0, keys)
    inside = token < size
    tokens = (first_token + token).to(tl.int64)
    of_key, of_value = inside[:, None], inside[:, None]
    if keys != key_dim:
        of_key = of_key & (key < key_dim)[None, :]
    if value_dim % values != 0:
        of_value = of_value & (value < value_dim)[None, :]
    source = mixed + (tokens * (all_heads // heads) + number // heads)[:, None] * channels
    q = tl.load(source + (q_channel + key)[None, :], mask=of_key, other=0.0)
    k = tl.load(source + (k_channel + key)[None, :], mask=of_key, other=0.0)
    faded = tl.load(fadeds + tokens * all_heads + number, mask=inside, other=0.0)
    last = tl.min(faded)
    faded = tl.where(inside, faded, last)
    of_heads = (tokens * all_heads + number)[:, None]
    if is_delta:
        looked_up = tl.load(w + of_heads * key_dim + key[None, :], mask=of_key, other=0.0)
        change = tl.load(u + of_heads * value_dim + value[None, :], mask=of_value, other=0.0)
        change = change.to(tl.float32) - tl.dot(looked_up, state.to(dtype))
    else:
        channel = v_channel + number % heads * value_dim + value
        x = tl.load(source + channel[None, :], mask=of_value, other=0.0).to(tl.float32)
        step = tl.load(seconds + tokens * all_heads + number, mask=inside, other=0.0)
        change = x * step[:, None]
    sees = token[:, None] >= token[None, :]
    left = tl.exp(tl.where(sees, faded[:, None] - faded[None, :], float("-inf")))
    alike = tl.dot(q, tl.trans(k)) * left
    result = tl.dot(q, state.to(dtype)) * tl.exp(faded)[:, None]
    result += tl.dot(alike.to(dtype), change.to(dtype))
    if not is_delta:
        result += x * tl.load(skips + number)
    target = out + (of_heads + decodes * all_heads) * value_dim
    tl.store(target + value[None, :], result, mask=of_value)
    change = change * tl.exp(last - faded)[:, None]
    return state * tl.exp(last) + tl.dot(tl.trans(k), change.to(dtype))


@triton.jit(do_not_specialize=["decodes", "table_width", "saves"])
def _fold(
    made, mixed, fadeds, seconds, is_right, u, w, out, numbers, stamps, skips, table, starts,
    contexts, page_stride, unit_stride, layer_offset, made_stride, decodes, table_width, saves,
    q_first, q_stride, k_first, k_stride, v_first, v_stride, shared_by,
    is_delta: tl.constexpr, heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    kernel: tl.constexpr, q_channel: tl.constexpr, k_channel: tl.constexpr,
    v_channel: tl.constexpr, channels: tl.constexpr, grid: tl.constexpr, keys: tl.constexpr,
    values: tl.constexpr, block: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    tile, number, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    all_heads = tl.num_programs(1)
    units = all_heads // heads
    first = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first
    if count == 0:
        return
    unit, head = number // heads, number % heads
    start = tl.maximum(tl.load(contexts + decodes + row) - count, 0)
    pages = table + (decodes + row) * table_width
    read = tl.load(pages).to(tl.int64)
    place = unit.to(tl.int64) * unit_stride + layer_offset
    before = read * page_stride + place
    right = tl.load(is_right + row * units + unit) > 0
    has_old = right & (read > 0)
    key = tl.arange(0, keys)
    value = tile * values + tl.arange(0, values)
    key_inside, value_inside = key < key_dim, value < value_dim
    there = key_inside[:, None] & value_inside[None, :]
    at = _STAMP + (kernel - 1) * channels + (head * key_dim + key[:, None]) * value_dim
    at += value[None, :]
    state = tl.load(numbers + before + at, mask=there & has_old, other=0.0)
    done = start * 0
    for piece in range(saves + 1):
        # Up to each state that is saved, and then up to the row's end.
        is_last = piece == saves
        page = tl.load(pages + 1 + tl.where(is_last, 0, 1 + 2 * piece)).to(tl.int64)
        saved_at = tl.load(pages + 1 + tl.where(is_last, 0, 2 + 2 * piece))
        upto = tl.where(is_last, count, saved_at - start)
        usable = (page > 0) & (upto > 0) & (upto <= count)
        upto = tl.where(is_last, count, tl.where(usable, tl.maximum(upto, done), done))
        index = (start + done) // grid
        chunks = tl.where(upto > done, (start + upto + grid - 1) // grid - index, 0)
        for chunk in range(chunks):
            border = (index + chunk) * grid - start
            begin = tl.maximum(border, done)
            size = tl.minimum(border + grid, upto) - begin
            state = _through(
                state, mixed, fadeds, seconds, u, w, skips, out, first + begin, size, decodes,
                number, all_heads, value, is_delta, heads, key_dim, value_dim, q_channel, k_channel,
                v_channel, channels, grid, keys, values,
            )  # fmt: skip
        if (page > 0) & (usable | is_last):
            to = page * page_stride + place
            tl.store(numbers + to + at, state, mask=there)
            if (tile == 0) & (head == 0):
                stamp = tl.where(right, start + upto, _SPOILT)
                _keep(
                    made, numbers, stamps, before, to, has_old, decodes + first, upto, stamp,
                    made_stride, unit, q_first, q_stride, k_first, k_stride, v_first, v_stride,
                    shared_by, key_dim, kernel, q_channel, k_channel, v_channel, channels, block,
                    columns,
                )  # fmt: skip
        done = upto


def fold(
    made: Made,
    mixed: Mixed,
    solved: Solved | None,
    weights: Weights,
    kept: Kept,
    states: States,
    shape: Shape,
    out: Tensor,
) -> None:
    """Folds prompts into their states. `solved`: of the delta rule. `out`: [T, U * R * Dv],
    contiguous, of which the rows of prompts are filled in."""
    step, table = states.step, states.step.page_table
    assert step.query_starts is not None, "the step has prompts"
    units, nothing = len(weights.taps), weights.rate
    keys = max(LEAST_TILE, power_of_2(shape.key_dim))
    values = min(FOLDING.columns, max(LEAST_TILE, power_of_2(shape.value_dim)))
    grid = pieces_of(shape.value_dim, values), units * shape.heads, states.prompts
    programs = grid[0] * grid[1] * grid[2]
    launch(
        _fold,
        grid,
        made.inputs,
        mixed.inputs,
        mixed.faded,
        mixed.second,
        mixed.is_right,
        *(solved or (nothing, nothing)),
        out,
        kept.pool.elements,
        kept.pool.integers,
        nothing if weights.skip is None else weights.skip,
        table,
        step.query_starts,
        step.context_lens,
        *kept.strides,
        made.inputs.stride(0),
        step.num_decodes,
        table.shape[1],
        (table.shape[1] - 2) // 2,
        *made.sources,
        *shape,
        shape.channels,
        GRID,
        keys,
        values,
        power_of_2(shape.channels),
        power_of_2(shape.kernel),
        num_warps=FOLDING.warps,
        num_stages=1 if shape.is_delta and programs > MANY else FOLDING.stages,
    )
