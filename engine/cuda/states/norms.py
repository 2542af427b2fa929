"""The norms and gates behind a recurrence, in one pass each.

A value is rounded at the same places as in `engine.model.mixers.delta` and `.mamba`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.cuda.states.layout import Made, Places, Shape
from engine.cuda.states.parts import silu
from engine.model.linear import RmsNorm

HEADS_AT_ONCE: Final = 8
"""Heads of a program. Not tuned."""


@triton.jit
def gated_norm(result, gate, weight, inside, eps, value_dim: tl.constexpr, dtype: tl.constexpr):
    """Behind the norm and the gate of the delta rule."""
    result = result.to(dtype).to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.where(inside, result * result, 0.0)) / value_dim + eps)
    return (result * scale * weight).to(dtype).to(tl.float32) * silu(gate)


@triton.jit
def norm_parts(
    out, gates, gain, eps,
    heads: tl.constexpr, value_dim: tl.constexpr, values: tl.constexpr,
):  # fmt: skip
    """Norms and gates what several programs have written of a unit's heads."""
    value = tl.arange(0, values)
    inside = value < value_dim
    weight = tl.load(gain + value, mask=inside, other=0.0).to(tl.float32)
    for head in tl.static_range(heads):
        at = head * value_dim + value
        gate = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(out + at, mask=inside, other=0.0, cache_modifier=".cg")
        done = gated_norm(given, gate, weight, inside, eps, value_dim, out.dtype.element_ty)
        tl.store(out + at, done, mask=inside)


@triton.jit(do_not_specialize=["decodes"])
def _norm_heads(
    x, out, made, gain, made_stride, decodes, all_heads, z_first, z_stride, eps,
    heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = decodes + tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * block + tl.arange(0, block)
    at = tl.arange(0, width)[None, :]
    inside = (number < all_heads)[:, None] & (at < size)
    places = number[:, None] * size + at
    value = tl.load(x + token * all_heads * size + places, mask=inside, other=0.0).to(tl.float32)
    source = z_first + number // heads * z_stride + number % heads * size
    gate = tl.load(made + token * made_stride + source[:, None] + at, mask=inside, other=0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    scale = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
    weight = tl.load(gain + at, mask=at < size, other=0.0).to(tl.float32)
    normed = (value * scale[:, None] * weight).to(dtype).to(tl.float32)
    tl.store(out + token * all_heads * size + places, normed * silu(gate.to(tl.float32)), inside)


def norm_heads(
    x: Tensor, made: Made, shape: Shape, norm: RmsNorm, decodes: int, out: Tensor
) -> None:
    """Norms the values of each head, and multiplies them by silu of their gates (the delta rule).

    Args:
        x: [T, U * R * Dv], what the rule gives.
        made: of the same tokens.
        shape: the layer's.
        norm: the norm.
        decodes: so many tokens are left out, at the front.
        out: [T, U * R * Dv], which may be `x`.
    """
    size = shape.value_dim
    heads = x.shape[1] // size
    block = min(HEADS_AT_ONCE, power_of_2(heads))
    launch(
        _norm_heads,
        (len(x) - decodes, pieces_of(heads, block)),
        x,
        out,
        made.inputs,
        norm.weight,
        made.inputs.stride(0),
        decodes,
        heads,
        *made.gate[:2],
        norm.eps,
        shape.heads,
        size,
        power_of_2(size),
        block,
    )


@triton.jit
def _norm_groups(
    x, out, made, gain, made_stride, z_first, eps, groups, size: tl.constexpr, block: tl.constexpr
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, block)
    inside = at < size
    place = group * size + at
    value = tl.load(x + token * groups * size + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(made + token * made_stride + z_first + place, mask=inside, other=0.0)
    value = value * silu(gate.to(tl.float32))
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    dtype: tl.constexpr = out.dtype.element_ty
    weight = tl.load(gain + place, mask=inside, other=0.0).to(tl.float32)
    normed = (value * scale).to(dtype).to(tl.float32) * weight
    tl.store(out + token * groups * size + place, normed, mask=inside)


def norm_groups(
    x: Tensor, inputs: Tensor, gate: Places, gain: Tensor, groups: int, eps: float
) -> Tensor:
    """Multiplies by silu of the gates, and norms the numbers of each group (Mamba-2).

    Args:
        x: [T, N] float32, what the recurrence gives.
        inputs: [T, ..] with the gates, of which `gate.first` is the first.
        gate: where they are; all N lie side by side.
        gain: [N], of the norm.
        groups: of N numbers.
        eps: of the norm.

    Returns:
        [T, N] in the dtype of `inputs`.
    """
    out = inputs.new_empty(x.shape)
    size = x.shape[1] // groups
    block = power_of_2(size)
    launch(
        _norm_groups,
        (len(x), groups),
        x,
        out,
        inputs,
        gain,
        inputs.stride(0),
        gate.first,
        eps,
        groups,
        size,
        block,
        num_warps=8 if block > 2048 else 4,
    )
    return out
