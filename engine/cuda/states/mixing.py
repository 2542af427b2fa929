"""What comes before the recurrence of prompts: the convolution, norms of q and k, and gates."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.cuda.states.layout import Kept, Made, Shape, States, Weights
from engine.cuda.states.parts import silu, softplus, source_of
from engine.model.mixers.config import GRID
from engine.pool.state_pool import STAMP_NUMBERS

HEADS_AT_ONCE: Final = 32
"""Heads of a program that makes gates. Not tuned."""
_STAMP = tl.constexpr(STAMP_NUMBERS)


class Mixed(NamedTuple):
    """What the first two kernels give, by token of prompts."""

    inputs: Tensor
    """[T, U, C] in the model's dtype: q, k and values."""
    faded: Tensor
    """[T, U, R] float32: sum of log decays from the piece's begin."""
    second: Tensor
    """[T, U, R] float32: beta, or time steps."""
    is_right: Tensor
    """[rows, U] int32: whether the state before is what it should be."""


@triton.jit
def _taps_of(
    rows, token, count, within, made_stride, weights, own,
    kernel: tl.constexpr,
):  # fmt: skip
    """[tokens, channels]: what the convolution adds up of this step's tokens."""
    total = tl.zeros((token.shape[0], own.shape[0]), tl.float32)
    for back in tl.static_range(kernel):
        there = ((token < count) & (within + token >= back))[:, None] & own[None, :]
        value = tl.load(rows - back * made_stride, mask=there, other=0.0).to(tl.float32)
        tap = tl.load(weights + kernel - 1 - back, mask=own, other=0.0).to(tl.float32)
        total += value * tap[None, :]
    return total


@triton.jit
def _mixed(
    total, bias, own, part,
    is_delta: tl.constexpr, key_dim: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """Behind the taps."""
    if has_bias:
        total += tl.load(bias, mask=own, other=0.0).to(tl.float32)[None, :]
    mixed = silu(total)
    if is_delta:  # noqa: SIM102 -- it is known when the kernel is compiled
        if part < 2:
            power = tl.sum(tl.where(own[None, :], mixed * mixed, 0.0), 1)
            factor = tl.where(part == 0, key_dim**-0.5, 1.0)
            mixed = mixed * (tl.rsqrt(power + 1e-6) * factor)[:, None]
    return mixed


@triton.jit(do_not_specialize=["decodes", "table_width"])
def _convolve(
    made, out, is_right, numbers, stamps, taps, bias, table, chunks, spoilt,
    page_stride, unit_stride, layer_offset, made_stride, decodes, table_width,
    q_first, q_stride, k_first, k_stride, v_first, v_stride, shared_by,
    is_delta: tl.constexpr, heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
    kernel: tl.constexpr, q_channel: tl.constexpr, k_channel: tl.constexpr,
    v_channel: tl.constexpr, channels: tl.constexpr, has_bias: tl.constexpr, grid: tl.constexpr,
    width: tl.constexpr, few: tl.constexpr,
):  # fmt: skip
    part, unit = tl.program_id(0), tl.program_id(1)
    units = tl.num_programs(1)
    chunk = chunks + tl.program_id(2) * 5
    count = tl.load(chunk + 2)
    if count == 0:
        return
    row, first = tl.load(chunk), tl.load(chunk + 1)
    within, start = tl.load(chunk + 3), tl.load(chunk + 4)
    size, begin = key_dim, q_channel
    if part == 1:
        begin = k_channel
    if part > 1:
        size, begin = value_dim, v_channel + (part - 2) * value_dim
    at = tl.arange(0, width)
    own, channel = at < size, begin + at
    source = source_of(
        channel, unit, q_first, q_stride, k_first, k_stride, v_first, v_stride, shared_by,
        q_channel, k_channel, v_channel, key_dim,
    )  # fmt: skip
    weights, own_bias = (
        taps + (unit * channels + channel) * kernel,
        bias + unit * channels + channel,
    )
    from_here = made + (decodes + first).to(tl.int64) * made_stride
    target = out + (first.to(tl.int64) * units + unit) * channels
    token = tl.arange(0, grid)
    rows = from_here + token[:, None] * made_stride + source[None, :]
    total = _taps_of(rows, token, count, within, made_stride, weights, own, kernel)
    mixed = _mixed(total, own_bias, own, part, is_delta, key_dim, has_bias)
    # The first tokens of a row read of those before this step, too.
    alone = (token < count) & (within + token >= kernel - 1)
    places = token[:, None] * units * channels + channel[None, :]
    tl.store(target + places, mixed, mask=alone[:, None] & own[None, :])
    if within == 0:
        read = tl.load(table + (decodes + row) * table_width).to(tl.int64)
        before = read * page_stride + unit.to(tl.int64) * unit_stride + layer_offset
        folded = tl.where(read > 0, tl.load(stamps + before), 0)
        right = folded == start
        if part == 0:
            tl.store(is_right + row * units + unit, right.to(tl.int32))
            if right == 0:
                tl.store(spoilt + decodes + row, 1)
        early = tl.arange(0, few)
        early_rows = from_here + early[:, None] * made_stride + source[None, :]
        early_total = _taps_of(early_rows, early, count, within, made_stride, weights, own, kernel)
        columns = numbers + before + _STAMP + channel[None, :] * (kernel - 1)
        for back in tl.static_range(1, kernel):
            column = kernel - 1 + early[:, None] - back
            there = own[None, :] & (early < back)[:, None] & right & (read > 0)
            value = tl.load(columns + column, mask=there, other=0.0)
            tap = tl.load(weights + kernel - 1 - back, mask=own, other=0.0).to(tl.float32)
            early_total += value * tap[None, :]
        early_mixed = _mixed(early_total, own_bias, own, part, is_delta, key_dim, has_bias)
        is_early = (early < tl.minimum(count, kernel - 1))[:, None] & own[None, :]
        early_places = early[:, None] * units * channels + channel[None, :]
        tl.store(target + early_places, early_mixed, mask=is_early)


@triton.jit(do_not_specialize=["decodes"])
def _gate(
    gates, faded, second, rates, rate_biases, chunks, gates_stride, decodes, number_of_heads,
    rate_first, rate_stride, beta_first, beta_stride, least, most,
    is_delta: tl.constexpr, heads: tl.constexpr, grid: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    chunk = chunks + tl.program_id(1) * 5
    count = tl.load(chunk + 2)
    if count == 0:
        return
    first = tl.load(chunk + 1)
    number = tl.program_id(0) * block + tl.arange(0, block)
    there = number < number_of_heads
    unit, head = number // heads, number % heads
    token = tl.arange(0, grid)
    inside = (token < count)[:, None] & there[None, :]
    rows = gates + (decodes + first + token).to(tl.int64)[:, None] * gates_stride
    rate = tl.load(rows + (rate_first + unit * rate_stride + head)[None, :], mask=inside, other=0.0)
    own_bias = tl.load(rate_biases + number, mask=there, other=0.0)
    step = softplus(rate.to(tl.float32) + own_bias[None, :])
    if not is_delta:
        step = tl.minimum(tl.maximum(step, least), most)
    speed = tl.exp(tl.load(rates + number, mask=there, other=0.0))
    log_decay = tl.where(inside, -speed[None, :] * step, 0.0)
    target = (first + token).to(tl.int64)[:, None] * number_of_heads + number[None, :]
    tl.store(faded + target, tl.cumsum(log_decay, 0), mask=inside)
    if is_delta:
        place = (beta_first + unit * beta_stride + head)[None, :]
        step = tl.sigmoid(tl.load(rows + place, mask=inside, other=0.0).to(tl.float32))
    tl.store(second + target, step, mask=inside)


def mix(
    made: Made, weights: Weights, kept: Kept, states: States, shape: Shape, chunks: Tensor
) -> Mixed:
    """The first two kernels. `chunks`: see `engine.cuda.states.chunks`."""
    step, table, inputs = states.step, states.step.page_table, made.inputs
    units, tokens = len(weights.taps), len(inputs) - step.num_decodes
    shape_of_heads = tokens, units, shape.heads
    mixed = Mixed(
        inputs.new_empty(tokens, units, shape.channels),
        inputs.new_empty(shape_of_heads, dtype=torch.float32),
        inputs.new_empty(shape_of_heads, dtype=torch.float32),
        inputs.new_empty((states.prompts, units), dtype=torch.int32),
    )
    nothing = weights.rate
    launch(
        _convolve,
        (2 + shape.heads, units, len(chunks)),
        inputs,
        mixed.inputs,
        mixed.is_right,
        kept.pool.elements,
        kept.pool.integers,
        weights.taps,
        nothing if weights.bias is None else weights.bias,
        table,
        chunks,
        states.spoilt,
        *kept.strides,
        inputs.stride(0),
        step.num_decodes,
        table.shape[1],
        *made.sources,
        *shape,
        shape.channels,
        weights.bias is not None,
        GRID,
        power_of_2(max(shape.key_dim, shape.value_dim)),
        power_of_2(shape.kernel - 1),
        num_warps=8,
    )
    heads = units * shape.heads
    block = min(HEADS_AT_ONCE, power_of_2(heads))
    launch(
        _gate,
        (pieces_of(heads, block), len(chunks)),
        made.gates,
        mixed.faded,
        mixed.second,
        weights.rate,
        weights.rate_bias,
        chunks,
        made.gates.stride(0),
        step.num_decodes,
        heads,
        *made.rate[:2],
        *made.beta[:2],
        *weights.steps,
        *shape[:2],
        GRID,
        block,
    )
    return mixed
