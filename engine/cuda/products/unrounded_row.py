"""Products in FP8 of one row that is not rounded yet, such as attention's: a product rounds the row
itself. So a kernel less runs, and weights are asked for while the kernel before still runs.

Each program rounds the whole row again. So there are few programs with several outputs each, and a
row is narrow. Other rows are rounded by a kernel of its own, once.
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
from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.cuda.products.own_rounding import (
    BLOCK,
    KINDS,
    asked,
    most_of,
    read,
    rounding_of,
    scales_asked,
    times,
)
from engine.model.precision.base import Kind
from engine.model.precision.rounding import Rounding

_PROGRAMS: Final = 264
"""The most of a product: about two for each processor. Not measured."""
_MOST_INPUTS: Final = 4096
_BYTES: Final = 32768
"""Most bytes of a weight that a program asks for at once."""
_BYTES_OF_A_WARP: Final = 4096
"""16 bytes for each of its threads, eight times."""
_MOST_WARPS: Final = 8
"""Warps of a program. Not tuned."""


class Cut(NamedTuple):
    """How a product is cut."""

    outputs: int
    """Outputs of a program."""
    inputs: int
    """Inputs of a row, up to a power of two: they are loaded at once."""


@triton.jit
def _unrounded_dot(
    x, given, values, scales, bias, out, outputs,
    inputs: tl.constexpr, kind: tl.constexpr, group: tl.constexpr, has_bias: tl.constexpr,
    pdl: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * bn + tl.arange(0, bn)
    inside = row < outputs
    at = tl.arange(0, bk)
    weight = asked(values, row, at, inputs, inside)
    scale = scales_asked(scales, row, inside, kind)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    most = 0.0
    if group == 0:
        most = most_of(x, inputs, bk)
    taken = read(x, at, inputs, most, given, group)
    total = tl.sum(times(taken, weight, scales, row, at, inputs, kind), axis=1) * scale
    if has_bias:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row, total, mask=inside)


def cut_of(values: Tensor, rows: int) -> Cut | None:
    """How a product of so many rows is cut, by shapes alone; None: they are rounded apart."""
    outputs, inputs = values.shape
    if rows != 1 or inputs > _MOST_INPUTS:
        return None
    at_once = power_of_2(inputs)
    each = power_of_2(pieces_of(outputs, _PROGRAMS))
    return Cut(each, at_once) if each <= min(BLOCK.value, _BYTES // at_once) else None


def product(
    values: Tensor,
    scales: Tensor,
    x: Tensor,
    how: Rounding,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    cut: Cut,
) -> Tensor:
    """The product of one row, rounded on the way.

    Args:
        values: [N, K] e4m3, contiguous.
        scales: [N] float32, or [N / 128, K / 128], contiguous.
        x: [1, K], contiguous, not rounded.
        how: it is rounded.
        bias: [N], or None.
        out_dtype: of the result.
        cut: `cut_of` these.

    Returns:
        [1, N]
    """
    outputs, inputs = values.shape
    out = torch.empty(1, outputs, dtype=out_dtype, device=values.device)
    given, group = rounding_of(how, scales)
    kind = KINDS[Kind.FP8_CHANNELS if scales.dim() == 1 else Kind.FP8_BLOCKS]
    launch(
        _unrounded_dot,
        (pieces_of(outputs, cut.outputs),),
        x,
        given,
        values,
        scales,
        out if bias is None else bias,
        out,
        outputs,
        inputs,
        kind,
        group,
        bias is not None,
        early(),
        *cut,
        num_warps=max(1, min(_MOST_WARPS, cut.outputs * cut.inputs // _BYTES_OF_A_WARP)),
        launch_pdl=early(),
    )
    return out
