"""What products of one row are made of whose programs round the row themselves, while their weights
come. A kernel less runs then. Rounding costs each program the same, so a program has several
outputs.

Shapes: bn outputs of a program, bk inputs of a step, K inputs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.products.rounding import GIVEN, PLAIN, e4m3_of, scale_of
from engine.model.precision.base import Kind
from engine.model.precision.rounding import Rounding

CHANNELS: Final = tl.constexpr(1)
BLOCKS: Final = tl.constexpr(2)
KINDS: Final = {None: 0, Kind.FP8_CHANNELS: 1, Kind.FP8_BLOCKS: 2}
"""What scales a weight has: the `kind` of a kernel."""
BLOCK: Final = tl.constexpr(128)
_GIVEN: Final = tl.constexpr(GIVEN)


@triton.jit
def asked(values, row, at, inputs, inside):
    """Weights [bn, bk]."""
    mask = inside[:, None] & (at < inputs)[None, :]
    return tl.load(values + row[:, None] * inputs + at[None, :], mask=mask, other=0.0)


@triton.jit
def most_of(x, inputs: tl.constexpr, bk: tl.constexpr):
    """The largest magnitude of a row of several steps; that of one step is found by `read`."""
    most = 0.0
    if inputs > bk:
        for first in tl.static_range(0, inputs, bk):
            at = (first + tl.arange(0, bk))[None, :]
            value = tl.load(x + at, mask=at < inputs, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.max(tl.abs(value)), propagate_nan=tl.PropagateNan.ALL)
    return most


@triton.jit
def read(x, at, inputs: tl.constexpr, most, given, group: tl.constexpr):
    """A step of the row, [1, bk] float32, rounded as `engine.model.precision.rounding` says.
    `group`: -2: not at all; -1: by the given scale; 0: by its largest magnitude; otherwise by that
    of each group."""
    value = tl.load(x + at[None, :], mask=(at < inputs)[None, :], other=0.0).to(tl.float32)
    if group != PLAIN:
        bk: tl.constexpr = at.shape[0]
        if group == _GIVEN:
            scale = tl.zeros((1, bk), tl.float32) + tl.load(given)
        elif group == 0:
            if inputs <= bk:
                most = tl.max(tl.abs(value))
            scale = tl.zeros((1, bk), tl.float32) + scale_of(most)
        else:
            parts: tl.constexpr = bk // group
            of_parts = tl.max(tl.abs(tl.reshape(value, (parts, group))), axis=1, keep_dims=True)
            scale = tl.reshape(tl.broadcast_to(scale_of(of_parts), (parts, group)), (1, bk))
        value = e4m3_of(value, scale).to(tl.float32) * scale
    return value


@triton.jit
def times(taken, weight, scales, row, at, inputs: tl.constexpr, kind: tl.constexpr):
    """Products [bn, bk]. All rows of a program lie in one block of FP8 in blocks."""
    if kind == BLOCKS:
        blocks: tl.constexpr = inputs // BLOCK
        place = scales + tl.min(row) // BLOCK * blocks + at // BLOCK
        taken = taken * tl.load(place, mask=at < inputs, other=0.0)[None, :]
    return taken * weight.to(tl.float32)


@triton.jit
def scales_asked(scales, row, inside, kind: tl.constexpr):
    """Scales by channel, [bn]; 1 where a weight has none."""
    scale = tl.full(row.shape, 1.0, tl.float32)
    if kind == CHANNELS:
        scale = tl.load(scales + row, mask=inside, other=0.0)
    return scale


def rounding_of(how: Rounding | None, unused: Tensor) -> tuple[Tensor, int]:
    """The given scale and the `group` of a kernel. `unused` stands for a scale that is not
    given."""
    if how is None:
        return unused, int(PLAIN.value)
    if how.scale is not None:
        return how.scale, GIVEN
    return unused, how.group or 0
