"""Products of one row with a weight in FP8. Memory is the only limit of a batch of one.

Each output has one program (or an output of gate and of up, which it activates and multiplies).
Libraries reach the chip's bandwidth only on the largest weights here, because they tile for
matrices. Tensor cores would not help: in FP8, too, the sums are done before the weights arrive.

A program asks for its first weights while the kernel before still runs, and then waits for the row
(programmatic dependent launch).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.kernels import launch
from engine.model.precision.rounding import Rounded, plain_of

_CHANNELS: Final = 1
_BLOCKS: Final = 2
"""What scales a weight has: the `kind` of a kernel."""


class Cut(NamedTuple):
    """How a row of a weight is read."""

    block: int
    """Inputs that are loaded at once: a power of two times 128."""
    warps: int = 4


_CUTS: Final = (Cut(2048), Cut(1024), Cut(512))
"""The first that divides a row is used."""


@triton.jit
def _loaded(row, start, block: tl.constexpr):
    """A block of a row, [block / 128, 128]."""
    line = tl.arange(0, block // 128)[:, None] * 128
    return tl.load(row + start + line + tl.arange(0, 128)[None, :])


@triton.jit
def _plus(
    acc, taken, weight, scales, x_scales, step, row, start, lines: tl.constexpr, kind: tl.constexpr
):  # fmt: skip
    """The sums with those of a block, scaled if the scales change along a row."""
    products = taken * weight.to(tl.float32)
    if kind == 2:
        line = start // 128 + tl.arange(0, acc.shape[0])
        scale = tl.load(scales + row // 128 * lines + line) * tl.load(x_scales + line * step)
        products *= scale[:, None]
    return acc + products


@triton.jit
def _scale(scales, row, kind: tl.constexpr):
    """The scale of a row; 1 if it has several."""
    scale = 1.0
    if kind == 1:
        scale = tl.load(scales + row)
    return scale


@triton.jit
def _dot(
    x,
    x_scales,
    step,
    weight,
    scales,
    bias,
    out,
    inputs: tl.constexpr,
    block: tl.constexpr,
    kind: tl.constexpr,
    has_bias: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _one(x, x_scales, step, weight, scales, bias, out, row, inputs, block, kind, has_bias, pdl)


@triton.jit
def _dots(
    x, x_scales, step, weight, scales, out, outputs, plain, other_weight, other_out,
    inputs: tl.constexpr, block: tl.constexpr, kind: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """Another product behind the first one, of the same row in 16 bits."""
    row = tl.program_id(0).to(tl.int64)
    if row < outputs:
        _one(x, x_scales, step, weight, scales, out, out, row, inputs, block, kind, False, pdl)
    else:
        own = row - outputs
        coming = _loaded(other_weight + own * inputs, 0, block)
        if pdl:
            gdc_launch_dependents()
            gdc_wait()
        acc = tl.zeros((block // 128, 128), tl.float32)
        for start in tl.static_range(0, inputs, block):
            value = coming
            if start + block < inputs:
                coming = _loaded(other_weight + own * inputs, start + block, block)
            acc += _loaded(plain, start, block).to(tl.float32) * value.to(tl.float32)
        tl.store(other_out + own, tl.sum(acc))


@triton.jit
def _one(
    x, x_scales, step, weight, scales, bias, out, row,
    inputs: tl.constexpr, block: tl.constexpr, kind: tl.constexpr, has_bias: tl.constexpr,
    pdl: tl.constexpr,
):  # fmt: skip
    """An output."""
    lines: tl.constexpr = inputs // 128
    coming = _loaded(weight + row * inputs, 0, block)
    scale = _scale(scales, row, kind)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    x_scale = _scale(x_scales, 0, kind)
    acc = tl.zeros((block // 128, 128), tl.float32)
    for start in tl.static_range(0, inputs, block):
        value = coming
        if start + block < inputs:
            coming = _loaded(weight + row * inputs, start + block, block)
        taken = _loaded(x, start, block).to(tl.float32)
        acc = _plus(acc, taken, value, scales, x_scales, step, row, start, lines, kind)
    total = tl.sum(acc) * scale * x_scale
    if has_bias:
        total += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, total)


@triton.jit
def _gated_dot(
    x,
    x_scales,
    step,
    weight,
    scales,
    out,
    outputs,
    inputs: tl.constexpr,
    block: tl.constexpr,
    kind: tl.constexpr,
    pdl: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    up_row = row + outputs
    lines: tl.constexpr = inputs // 128
    gate_coming = _loaded(weight + row * inputs, 0, block)
    up_coming = _loaded(weight + up_row * inputs, 0, block)
    gate_scale, up_scale = _scale(scales, row, kind), _scale(scales, up_row, kind)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    x_scale = _scale(x_scales, 0, kind)
    gate_acc = tl.zeros((block // 128, 128), tl.float32)
    up_acc = tl.zeros((block // 128, 128), tl.float32)
    for start in tl.static_range(0, inputs, block):
        gate, up = gate_coming, up_coming
        if start + block < inputs:
            gate_coming = _loaded(weight + row * inputs, start + block, block)
            up_coming = _loaded(weight + up_row * inputs, start + block, block)
        taken = _loaded(x, start, block).to(tl.float32)
        gate_acc = _plus(gate_acc, taken, gate, scales, x_scales, step, row, start, lines, kind)
        up_acc = _plus(up_acc, taken, up, scales, x_scales, step, up_row, start, lines, kind)
    dtype: tl.constexpr = out.dtype.element_ty
    gate = (tl.sum(gate_acc) * gate_scale * x_scale).to(dtype).to(tl.float32)
    up = (tl.sum(up_acc) * up_scale * x_scale).to(dtype).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row, activated * up)


def fp8_one_row(
    values: Tensor,
    scales: Tensor,
    x: Rounded,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    cut: Cut,
) -> Tensor:
    """The product of one row in FP8.

    Args:
        values: [N, K] e4m3, contiguous.
        scales: [N] float32, or [N / 128, K / 128], contiguous.
        x: [1, K], with a scale by row, or by groups of 128.
        bias: [N], or None.
        out_dtype: of the result.
        cut: its block divides K.

    Returns:
        [1, N]
    """
    outputs, inputs = values.shape
    out = torch.empty(1, outputs, dtype=out_dtype, device=values.device)
    activations = (x.values, x.scales, x.scales.stride(1))
    kind = _CHANNELS if scales.dim() == 1 else _BLOCKS
    given = out if bias is None else bias
    shape = (inputs, cut.block, kind, bias is not None, early())
    arguments = (*activations, values, scales, given, out, *shape)
    launch(_dot, (outputs,), *arguments, num_warps=cut.warps, launch_pdl=early())
    return out


def with_another(
    values: Tensor, scales: Tensor, x: Rounded, weight: Tensor, cut: Cut
) -> tuple[Tensor, Tensor]:
    """Two products of one row in one kernel, of which the second is in 16 bits and narrow.

    Args:
        values: [N, K] e4m3, contiguous.
        scales: as of `fp8_one_row`.
        x: [1, K], with what it was before it was rounded.
        weight: [M, K], contiguous, which reads that.
        cut: its block divides K.

    Returns:
        [1, N] and [1, M], in the dtype of `weight`.
    """
    outputs, inputs = values.shape
    plain = plain_of(x)
    out, other = plain.new_empty(1, outputs), plain.new_empty(1, len(weight))
    launch(
        _dots,
        (outputs + len(weight),),
        x.values,
        x.scales,
        x.scales.stride(1),
        values,
        scales,
        out,
        outputs,
        plain,
        weight,
        other,
        inputs,
        cut.block,
        _CHANNELS if scales.dim() == 1 else _BLOCKS,
        early(),
        num_warps=cut.warps,
        launch_pdl=early(),
    )
    return out, other


def fp8_gated(
    values: Tensor, scales: Tensor, x: Rounded, out_dtype: torch.dtype, cut: Cut
) -> Tensor:
    """silu(gate) * up: arguments as `fp8_one_row`, with values [2 I, K] -> [1, I]."""
    outputs, inputs = len(values) // 2, values.shape[1]
    out = torch.empty(1, outputs, dtype=out_dtype, device=values.device)
    activations = (x.values, x.scales, x.scales.stride(1))
    kind = _CHANNELS if scales.dim() == 1 else _BLOCKS
    arguments = (*activations, values, scales, out, outputs, inputs, cut.block, kind, early())
    launch(_gated_dot, (outputs,), *arguments, num_warps=cut.warps, launch_pdl=early())
    return out


def cut_of(x: Tensor) -> Cut | None:
    """How a weight is read for [T, K]. None if there is more than one row, or no
    size divides it."""
    if x.shape[0] != 1:
        return None
    return next((cut for cut in _CUTS if x.shape[1] % cut.block == 0), None)
