"""Products of one row with the weights of its experts, in 16 bits or FP8. Memory is the only limit.

A row has each expert once. So nothing is sorted, and a program belongs to a pair and to some output
channels, whose weights it asks for at once: tensor cores would want more rows than there are. FP8
weights want a rounded row. Each program rounds the row itself while its weights come, which costs
less than a kernel before it.

Shapes: C experts of the row, N output channels and K input channels of an expert.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.experts.cutting import Tiles, with_bias
from engine.cuda.experts.routing import gated, numbers
from engine.cuda.kernels import launch
from engine.cuda.products.rounding import GIVEN, PLAIN, e4m3_of, scale_of
from engine.model.experts.config import Gate
from engine.model.experts.stacked import Stacked
from engine.model.precision.base import Kind

_BYTES: Final = 8192
"""Of a weight that a program asks for."""
_MOST_INPUTS: Final = 4096
_CHANNELS: Final = tl.constexpr(1)
_BLOCKS: Final = tl.constexpr(2)
_KINDS: Final = {None: 0, Kind.FP8_CHANNELS: 1, Kind.FP8_BLOCKS: 2}
_BLOCK: Final = tl.constexpr(128)
_GIVEN: Final = tl.constexpr(GIVEN)


def tiles_of(weights: Stacked) -> Tiles:
    """By shapes alone. Of inputs that do not fit into a step, fewer outputs have room."""
    inputs = min(_MOST_INPUTS, triton.next_power_of_2(weights.inputs))
    size = weights.values.element_size() if inputs >= weights.inputs else 4
    return Tiles(max(1, _BYTES // (size * inputs)), inputs, 1)


@triton.jit
def _asked(values, row, at, inputs, inside):
    """Weights [bn, bk]."""
    mask = inside[:, None] & (at < inputs)[None, :]
    return tl.load(values + row[:, None] * inputs + at[None, :], mask=mask, other=0.0)


@triton.jit
def _most(x, inputs: tl.constexpr, bk: tl.constexpr):
    """The largest magnitude of a row."""
    most = 0.0
    for first in tl.static_range(0, inputs, bk):
        at = (first + tl.arange(0, bk))[None, :]
        value = tl.load(x + at, mask=at < inputs, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.max(tl.abs(value)), propagate_nan=tl.PropagateNan.ALL)
    return most


@triton.jit
def _read(x, at, inputs, most, given, group: tl.constexpr):
    """A step of the row, [1, bk] float32, rounded as `engine.model.precision.rounding` says."""
    value = tl.load(x + at[None, :], mask=(at < inputs)[None, :], other=0.0).to(tl.float32)
    if group != PLAIN:
        bk: tl.constexpr = at.shape[0]
        if group == _GIVEN:
            scale = tl.zeros((1, bk), tl.float32) + tl.load(given)
        elif group == 0:
            scale = tl.zeros((1, bk), tl.float32) + scale_of(most)
        else:
            parts: tl.constexpr = bk // group
            of_parts = tl.max(tl.abs(tl.reshape(value, (parts, group))), axis=1, keep_dims=True)
            scale = tl.reshape(tl.broadcast_to(scale_of(of_parts), (parts, group)), (1, bk))
        value = e4m3_of(value, scale).to(tl.float32) * scale
    return value


@triton.jit
def _times(taken, weight, scales, row, at, inputs: tl.constexpr, kind: tl.constexpr):
    """Products [bn, bk]. All rows of a program lie in one block of FP8 in blocks."""
    if kind == _BLOCKS:
        blocks: tl.constexpr = inputs // _BLOCK
        place = scales + tl.min(row) // _BLOCK * blocks + at // _BLOCK
        taken = taken * tl.load(place, mask=at < inputs, other=0.0)[None, :]
    return taken * weight.to(tl.float32)


@triton.jit
def _finished(acc, scales, bias, row, inside, kind: tl.constexpr, has_bias: tl.constexpr):
    """Sums [bn, 1] of products, with scales by channel and biases."""
    total = tl.sum(acc, axis=1, keep_dims=True)
    if kind == _CHANNELS:
        total *= tl.load(scales + row, mask=inside, other=0.0)[:, None]
    return with_bias(total, bias, row, inside, has_bias)


@triton.jit
def _one_row(
    values, scales, bias, x, given, out, experts, width, sharpness, shift, limit,
    inputs: tl.constexpr, by_token: tl.constexpr, gate: tl.constexpr, limited: tl.constexpr,
    has_bias: tl.constexpr, kind: tl.constexpr, group: tl.constexpr,
    bn: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    """`group`: how the row is rounded: -2: not at all; -1: by the given scale; 0: by its largest
    magnitude; otherwise by that of each group."""
    pair = tl.program_id(0)
    channel = tl.program_id(1) * bn + tl.arange(0, bn)
    inside = channel < width
    factor: tl.constexpr = 2 if gate else 1
    row = tl.load(experts + pair).to(tl.int64) * width * factor + channel
    at = tl.arange(0, bk)
    coming = _asked(values, row, at, inputs, inside)
    up_coming = coming
    if gate:
        up_coming = _asked(values, row + width, at, inputs, inside)
    if not by_token:
        x += pair * inputs
    most = 0.0
    if group == 0:
        most = _most(x, inputs, bk)
    acc, up = tl.zeros((bn, bk), tl.float32), tl.zeros((bn, bk), tl.float32)
    for first in tl.static_range(0, inputs, bk):
        weight, up_weight = coming, up_coming
        if first + bk < inputs:
            coming = _asked(values, row, first + bk + at, inputs, inside)
            if gate:
                up_coming = _asked(values, row + width, first + bk + at, inputs, inside)
        taken = _read(x, first + at, inputs, most, given, group)
        acc += _times(taken, weight, scales, row, first + at, inputs, kind)
        if gate:
            up += _times(taken, up_weight, scales, row + width, first + at, inputs, kind)
    total = _finished(acc, scales, bias, row, inside, kind, has_bias)
    if gate:
        up_total = _finished(up, scales, bias, row + width, inside, kind, has_bias)
        dtype: tl.constexpr = out.dtype.element_ty
        total = gated(total, up_total, dtype, sharpness, shift, limit, limited)
    target = out + pair * width + channel
    tl.store(target[:, None], total, mask=inside[:, None])


def product(
    x: Tensor,
    weights: Stacked,
    experts: Tensor,
    out: Tensor,
    by_token: bool,
    gate: Gate | None,
    cut: Tiles,
) -> None:
    """Fills in `out`, [C, N] or [C, N / 2]. See `engine.cuda.experts.products.product`.

    Args:
        x: [1, K] with `by_token`, else [C, K]; contiguous, in the model's dtype.
        weights: in 16 bits or FP8.
        experts: [1, C] int32.
        out: in the order of the experts.
        by_token: whether all experts have the same row.
        gate: what is done with gate and up.
        cut: how it is cut.
    """
    how, group = weights.input, PLAIN.value
    given = scales = out
    if how is not None and weights.scales is not None:
        scales = weights.scales
        group = GIVEN if how.scale is not None else how.group or 0
        given = scales if how.scale is None else how.scale
    launch(
        _one_row,
        (len(out), triton.cdiv(out.shape[1], cut.outputs)),
        weights.values,
        scales,
        out if weights.bias is None else weights.bias,
        x,
        given,
        out,
        experts,
        out.shape[1],
        *numbers(gate or Gate())[:3],
        weights.inputs,
        by_token,
        gate is not None,
        gate is not None and gate.limit is not None,
        weights.bias is not None,
        _KINDS[weights.kind],
        group,
        cut.outputs,
        cut.inputs,
        num_warps=cut.warps,
    )
