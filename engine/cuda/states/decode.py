"""A token of each decode row folded into its state, in one kernel a layer: the convolution, norms
of q and k, gates, the recurrence, of the delta rule the gated norm behind it, and the page in and
out.

A program takes a unit of a row. So nobody else reads or writes its part of the page, and a page is
written in place. A matrix is folded some columns at a time, and those of the next turn are asked
for before: memory is the limit, and few programs have room at once.

Few rows have few units. Then each turn has a program. All those of a unit read its stamp and the
inputs of q and k that are kept, so the last of them to arrive writes these, norms what the heads
give, and sets its counter back. Nobody waits for another program.

The stamp of the unit says how many tokens are folded in. If these are not all before this one, the
row is spoilt: it computes with zeros, and the host fails its request.

The delta rule is that of Yang et al. 2024, "Gated Delta Networks"; Mamba-2 of Dao and Gu 2024,
"Transformers are SSMs". All arithmetic is float32. See `engine.model.mixers.delta` and `.mamba`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.kernels import launch, power_of_2
from engine.cuda.states.keeping import (
    convolved,
    keep_shared,
    keep_state,
    keep_window,
    window_of,
)
from engine.cuda.states.layout import Kept, Made, Shape, States, Weights
from engine.cuda.states.norms import gated_norm, norm_parts
from engine.cuda.states.parts import softplus
from engine.model.linear import RmsNorm
from engine.pool.state_pool import SPOILT, STAMP_NUMBERS


class Threads(NamedTuple):
    """Threads of a program."""

    warps: int
    registers: int
    """The most of a thread; 0: the compiler's own bound."""
    columns: int
    """Columns of a matrix at a time: a power of two."""


THREADS: Final = Threads(4, 128, 32)
"""On an H200 64 rows of 32 matrices of 128 x 128 took 93 us so, 256 rows 350; with 64 columns and
no bound 101 and 377, with whole matrices a turn 103 and 381 (`bench.states`, 2026-11-27)."""
OF_MAMBA: Final = Threads(4, 0, 64)
"""For Mamba-2: 64 rows of 128 matrices of 128 x 64 took 167 us so, and 181 with 32 columns."""
SPLIT: Final = Threads(4, 0, 64)
"""Where each turn has a program: one row took 6.8 us so (11.6 with a program a unit), of Mamba-2
8.9 (26.4)."""
FEW: Final = 132
"""Programs of units up to which each turn has one: a Hopper's processors."""
_MOST_ARRIVALS: Final = 256
"""Counters: more than there are units of few rows."""
_SPOILT = tl.constexpr(SPOILT)
_STAMP = tl.constexpr(STAMP_NUMBERS)


@triton.jit
def _stepped(state, q, k, v, fade, strength, is_delta: tl.constexpr):
    """The matrix of a head behind a token, and what comes of that."""
    state = state * fade
    found = tl.sum(state * k[:, None], 0) if is_delta else 0.0
    change = (v - found) * strength
    state = state + k[:, None] * change[None, :]
    return state, tl.sum(state * q[:, None], 0)


@triton.jit
def _key(
    window, taps, bias, channel, inside,
    is_delta: tl.constexpr, kernel: tl.constexpr, has_bias: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """q or k of a unit."""
    vector = convolved(window, taps, bias, channel, inside, kernel, columns, has_bias)
    if is_delta:
        vector = vector * tl.rsqrt(tl.sum(vector * vector) + 1e-6)
    return vector


@triton.jit
def _speeds(
    head, number, own_gates, rates, rate_biases, rate_first, beta_first, least, most,
    is_delta: tl.constexpr,
):  # fmt: skip
    """What is left of a head's matrix, and how much of a token comes in."""
    rate = tl.load(own_gates + rate_first + head).to(tl.float32)
    step = softplus(rate + tl.load(rate_biases + number))
    if is_delta:
        strength = tl.sigmoid(tl.load(own_gates + beta_first + head).to(tl.float32))
    else:
        step = tl.minimum(tl.maximum(step, least), most)
        strength = step
    return tl.exp(-tl.exp(tl.load(rates + number)) * step), strength


@triton.jit
def _asked(
    head, first, token, numbers, before, exists, keeps, v_first,
    key_dim: tl.constexpr, value_dim: tl.constexpr, kernel: tl.constexpr, v_channel: tl.constexpr,
    channels: tl.constexpr, columns: tl.constexpr, keys: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's matrix, and the inputs of their convolution."""
    key, value = tl.arange(0, keys), first + tl.arange(0, tile)
    inside, own = value < value_dim, head * value_dim + value
    window = window_of(
        token, numbers, before + _STAMP, v_channel + own, v_first + own, inside, exists, keeps,
        kernel, columns,
    )  # fmt: skip
    at = _place(head, key, value, key_dim, value_dim, kernel, channels)
    there = (key < key_dim)[:, None] & inside[None, :]
    if keys == key_dim and value_dim % tile == 0:  # Masks take registers.
        state = tl.load(numbers + before + at, mask=exists, other=0.0)
    else:
        state = tl.load(numbers + before + at, mask=there & exists, other=0.0)
    return window, tl.where(keeps, state, 0.0)


@triton.jit
def _place(
    head, key, value,
    key_dim: tl.constexpr, value_dim: tl.constexpr, kernel: tl.constexpr, channels: tl.constexpr,
):  # fmt: skip
    """[keys, columns], where a head's matrix is in its unit."""
    at = _STAMP + (kernel - 1) * channels + (head * key_dim + key[:, None]) * value_dim
    return at + value[None, :]


@triton.jit
def _folded(
    window, state, head, first, q, k, fade, strength, numbers, after, beside, write, saved, taps,
    bias, skip,
    is_delta: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, kernel: tl.constexpr,
    v_channel: tl.constexpr, channels: tl.constexpr, has_bias: tl.constexpr, columns: tl.constexpr,
    keys: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """What comes of some columns, [tile], which are kept."""
    key, value = tl.arange(0, keys), first + tl.arange(0, tile)
    inside, channel = value < value_dim, v_channel + head * value_dim + value
    # Several threads may load the same number, and one stores another to its place. So all have
    # asked for what this turn reads before anybody writes.
    tl.debug_barrier()
    keep_window(numbers, after, beside, write, saved, window, channel, inside, kernel, columns)
    v = convolved(window, taps, bias, channel, inside, kernel, columns, has_bias)
    state, result = _stepped(state, q, k, v, fade, strength, is_delta)
    there = (key < key_dim)[:, None] & inside[None, :]
    at = _place(head, key, value, key_dim, value_dim, kernel, channels)
    is_whole: tl.constexpr = (keys == key_dim) & (value_dim % tile == 0)
    keep_state(numbers, after, beside, write, saved, at, state, there, is_whole)
    if not is_delta:
        result += v * skip
    return result


@triton.jit
def _heads(
    unit, q, k, token, own_gates, out, numbers, before, after, beside, write, saved, exists, keeps,
    taps, bias, rates, rate_biases, skips, gain, v_first, z_first, rate_first, beta_first, least,
    most, eps,
    is_delta: tl.constexpr, heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    kernel: tl.constexpr, v_channel: tl.constexpr, channels: tl.constexpr, has_bias: tl.constexpr,
    columns: tl.constexpr, keys: tl.constexpr, values: tl.constexpr, tile: tl.constexpr,
    split: tl.constexpr,
):  # fmt: skip
    """The heads of a unit, some columns a turn. If `split` a single turn, without a norm."""
    turns: tl.constexpr = values // tile
    value, of_turn = tl.arange(0, values), tl.arange(0, turns)[:, None]
    inside = value < value_dim
    has_gate = inside & is_delta
    weight = tl.load(gain + value, mask=has_gate, other=0.0).to(tl.float32)
    results = tl.zeros((turns, tile), tl.float32)
    begin = tl.program_id(2) if split else 0
    window, state = _asked(
        begin // turns, begin % turns * tile, token, numbers, before, exists, keeps, v_first,
        key_dim, value_dim, kernel, v_channel, channels, columns, keys, tile,
    )  # fmt: skip
    for at in range(begin, begin + 1 if split else heads * turns):
        head, turn, following = at // turns, at % turns, at + 1
        number = unit * heads + head
        fade, strength = _speeds(
            head, number, own_gates, rates, rate_biases, rate_first, beta_first, least, most,
            is_delta,
        )  # fmt: skip
        own = head * value_dim + value
        gate = tl.load(token + z_first + own, mask=has_gate, other=0.0).to(tl.float32)
        skip = tl.load(skips + number)
        next_window, next_state = window, state
        if not split:
            next_window, next_state = _asked(
                following // turns, following % turns * tile, token, numbers, before,
                exists & (following < heads * turns), keeps, v_first,
                key_dim, value_dim, kernel, v_channel, channels, columns, keys, tile,
            )  # fmt: skip
        result = _folded(
            window, state, head, turn * tile, q, k, fade, strength, numbers, after, beside, write,
            saved, taps, bias, skip,
            is_delta, key_dim, value_dim, kernel, v_channel, channels, has_bias, columns, keys,
            tile,
        )  # fmt: skip
        window, state = next_window, next_state
        if split:
            at_turn = turn * tile + tl.arange(0, tile)
            target = out + number * value_dim + at_turn
            tl.store(target, result, mask=at_turn < value_dim)
        else:
            results = tl.where(of_turn == turn, result[None, :], results)
            if turn == turns - 1:
                whole = tl.reshape(results, (values,))
                if is_delta:
                    whole = gated_norm(
                        whole, gate, weight, inside, eps, value_dim, out.dtype.element_ty
                    )
                tl.store(out + number * value_dim + value, whole, mask=inside)


@triton.jit
def _last_arrived(
    arrived, numbers, stamps, after, beside, write, saved, q_window, k_window, q_at, k_at, is_key,
    is_right, context, spoilt, out, gates, gain, eps,
    is_delta: tl.constexpr, heads: tl.constexpr, value_dim: tl.constexpr, kernel: tl.constexpr,
    columns: tl.constexpr, values: tl.constexpr,
):  # fmt: skip
    """What the last program of a unit does, when all have read and written."""
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(2) - 1:
        tl.store(arrived, 0)
        keep_shared(
            numbers, stamps, after, beside, write, saved, q_window, k_window, q_at, k_at, is_key,
            is_right, context, spoilt, kernel, columns,
        )  # fmt: skip
        if is_delta:
            norm_parts(out, gates, gain, eps, heads, value_dim, values)


@triton.jit(do_not_specialize=["table_width"])
def _decode_state(
    made, gates, out, numbers, stamps, taps, bias, rates, rate_biases, skips, gain, table, contexts,
    spoilt, arrivals, page_stride, unit_stride, layer_offset, made_stride, gates_stride,
    table_width,
    q_first, q_stride, k_first, k_stride, v_first, v_stride, shared_by, z_first, z_stride,
    rate_first, rate_stride, beta_first, beta_stride, least, most, eps,
    is_delta: tl.constexpr, heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    kernel: tl.constexpr, q_channel: tl.constexpr, k_channel: tl.constexpr,
    v_channel: tl.constexpr, channels: tl.constexpr, has_bias: tl.constexpr,
    columns: tl.constexpr, keys: tl.constexpr, values: tl.constexpr, tile: tl.constexpr,
    split: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    unit, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pages = table + row * table_width
    read, write = tl.load(pages).to(tl.int64), tl.load(pages + 1).to(tl.int64)
    saved, context = tl.load(pages + 2).to(tl.int64), tl.load(contexts + row)
    place, exists = unit.to(tl.int64) * unit_stride + layer_offset, read > 0
    before = read * page_stride + place
    after, beside = write * page_stride + place, saved * page_stride + place
    is_right = tl.where(exists, tl.load(stamps + before), 0) == context - 1
    keeps = is_right & exists
    token, owner = made + row * made_stride, unit // shared_by
    own_taps, own_bias = taps + unit * channels * kernel, bias + unit * channels
    key = tl.arange(0, keys)
    is_key = key < key_dim
    q_window = window_of(
        token, numbers, before + _STAMP, q_channel + key, q_first + owner * q_stride + key, is_key,
        exists, keeps, kernel, columns,
    )  # fmt: skip
    k_window = window_of(
        token, numbers, before + _STAMP, k_channel + key, k_first + owner * k_stride + key, is_key,
        exists, keeps, kernel, columns,
    )  # fmt: skip
    if not split:
        # Several threads may load the same number, and one stores another to its place. What a
        # program loads it asks for before that.
        tl.debug_barrier()
        keep_shared(
            numbers, stamps, after, beside, write, saved, q_window, k_window,
            q_channel + key, k_channel + key, is_key, is_right, context, spoilt + row, kernel,
            columns,
        )  # fmt: skip
    q = _key(
        q_window, own_taps, own_bias, q_channel + key, is_key, is_delta, kernel, has_bias, columns
    )  # fmt: skip
    k = _key(
        k_window, own_taps, own_bias, k_channel + key, is_key, is_delta, kernel, has_bias, columns
    )  # fmt: skip
    if is_delta:
        q = q * (key_dim**-0.5)
    of_row = out + row * tl.num_programs(0) * heads * value_dim
    _heads(
        unit, q, k, token, gates + row * gates_stride, of_row, numbers, before, after, beside,
        write, saved, exists, keeps, own_taps, own_bias, rates, rate_biases, skips, gain,
        v_first + unit * v_stride, z_first + unit * z_stride, rate_first + unit * rate_stride,
        beta_first + unit * beta_stride, least, most, eps, is_delta, heads, key_dim, value_dim,
        kernel, v_channel, channels, has_bias, columns, keys, values, tile, split,
    )  # fmt: skip
    if split:
        _last_arrived(
            arrivals + row * tl.num_programs(0) + unit, numbers, stamps, after, beside, write,
            saved, q_window, k_window, q_channel + key, k_channel + key, is_key, is_right, context,
            spoilt + row, of_row + unit * heads * value_dim, token + z_first + unit * z_stride,
            gain, eps, is_delta, heads, value_dim, kernel, columns, values,
        )  # fmt: skip


def decode_states(
    made: Made,
    weights: Weights,
    kept: Kept,
    states: States,
    shape: Shape,
    norm: RmsNorm | None,
    out: Tensor,
) -> None:
    """Folds one token of each decode row into its state, on one stream at a time.

    Args:
        made: of the step's tokens; those of decode rows come first.
        weights: of the layer.
        kept: its states.
        states: the step's rows.
        shape: the layer's.
        norm: of the delta rule, over the values of each head.
        out: [T, U * R * Dv], contiguous. Rows of decode rows are filled in: of the delta rule with
            gate and norm; of Mamba-2 what the recurrence gives.
    """
    step, table = states.step, states.step.page_table
    units, inputs = len(weights.taps), made.inputs
    keys, values = (power_of_2(dim) for dim in (shape.key_dim, shape.value_dim))
    nothing, split = weights.rate, units * step.num_decodes <= FEW
    threads = SPLIT if split else THREADS if shape.is_delta else OF_MAMBA
    tile = min(values, threads.columns)
    launch(
        _decode_state,
        (units, step.num_decodes, shape.heads * (values // tile) if split else 1),
        inputs,
        made.gates,
        out,
        kept.pool.elements,
        kept.pool.integers,
        weights.taps,
        nothing if weights.bias is None else weights.bias,
        weights.rate,
        weights.rate_bias,
        nothing if weights.skip is None else weights.skip,
        nothing if norm is None else norm.weight,
        table,
        step.context_lens,
        states.spoilt,
        _arrivals(inputs.device),
        *kept.strides,
        inputs.stride(0),
        made.gates.stride(0),
        table.shape[1],
        *_places(made),
        *weights.steps,
        0.0 if norm is None else norm.eps,
        *shape,
        shape.channels,
        weights.bias is not None,
        power_of_2(shape.kernel),
        keys,
        values,
        tile,
        split,
        early(),
        launch_pdl=early(),
        num_warps=threads.warps,
        **({"maxnreg": threads.registers} if threads.registers else {}),
    )


def _places(made: Made) -> tuple[int, ...]:
    heads = *made.q[:2], *made.k[:2], *made.v[:2], made.q.shared_by
    return *heads, *made.gate[:2], *made.rate[:2], *made.beta[:2]


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Programs of each row and unit that are done. Zeros between two launches."""
    return torch.zeros(_MOST_ARRIVALS, dtype=torch.int32, device=device)
