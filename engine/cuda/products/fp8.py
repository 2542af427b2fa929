"""Products of FP8 weights with FP8 activations: which kernel computes one.

One row has a kernel of ours. Up to `FEW_ROWS` rows, memory limits, and a kernel of ours is faster
than cuBLAS's where a weight has scales by channel. With more rows, arithmetic limits. Weights with
scales by block are cuBLAS's from two rows on, which was faster than ours.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention.parts import PROCESSORS
from engine.cuda.early import early
from engine.cuda.products.few_rows import LEAST_COLUMNS, Tiles, few_rows
from engine.cuda.products.one_row import cut_of, fp8_one_row
from engine.model.precision.fp8 import scaled_rows
from engine.model.precision.rounding import Rounded

FEW_ROWS: Final = 128
"""The most rows of a product of our own."""
_SINGLE_TILE_ROWS: Final = 64
"""Rows up to which cuBLAS is slower with every weight."""
_OUTPUTS: Final = 64
"""Outputs of a program."""
_CUBLAS_OUTPUTS: Final = 128
"""Outputs of a tile of cuBLAS."""
_AHEAD: Final = 512
"""Inputs whose weights a program asks for before the launch before it has ended (`Tiles.ahead`)."""


def fp8_linear(
    values: Tensor, scales: Tensor, x: Rounded, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """The product of rows with a weight whose output channels have a scale each.

    Args:
        values: [N, K] e4m3, contiguous; N and K are multiples of 16.
        scales: [N] float32.
        x: [T, K] with scales by row.
        bias: [N] in `out_dtype`, or None.
        out_dtype: bfloat16 or float16.

    Returns:
        [T, N]
    """
    (outputs, inputs), rows = values.shape, x.values.shape[0]
    if (cut := cut_of(x.values)) is not None:
        return fp8_one_row(values, scales, x, bias, out_dtype, cut)
    if (tiles := tiles_of(outputs, inputs, rows)) is not None:
        return few_rows(values, scales, *x[:2], bias, out_dtype, tiles)
    return scaled_rows(values, scales, x, bias, out_dtype)


def fp8_block_linear(
    values: Tensor, scales: Tensor, x: Rounded, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """The product of rows with a weight whose blocks of 128 x 128 have a scale each.

    Args:
        values: [N, K] e4m3, contiguous; both are multiples of 128.
        scales: [N / 128, K / 128] float32, contiguous.
        x: [T, K] with scales by groups of 128. Best column after column with space for a multiple
            of four rows, as `engine.cuda.products.rounding` leaves them; others are copied.
        bias: [N] in `out_dtype`, or None.
        out_dtype: bfloat16 or float16.

    Returns:
        [T, N]
    """
    if (cut := cut_of(x.values)) is not None:
        return fp8_one_row(values, scales, x, bias, out_dtype, cut)
    return _scaled_blocks(values, scales, x, bias, out_dtype)


def tiles_of(outputs: int, inputs: int, rows: int) -> Tiles | None:
    """How a product of few rows is cut; None: cuBLAS's is faster.

    Measured with the weights of the 8B shape on an H100 and an H200 (`bench/history/fp8.md`):

    - A tile of 64 outputs and 256 inputs is the best with every weight.
    - Weights with fewer tiles than the chip has processors are cut along the input, too: into a
      part for each processor, or two with 16 rows.
    - Where there are many tiles, two programs share a processor, and its memory.
    - From 65 rows on, cuBLAS wins if it has a tile for each processor.
    """
    wide = outputs >= PROCESSORS * _CUBLAS_OUTPUTS
    if rows > FEW_ROWS or (rows > _SINGLE_TILE_ROWS and wide):
        return None
    count = -(-outputs // _OUTPUTS)
    parts = max(1, PROCESSORS // count)
    if rows <= LEAST_COLUMNS and parts > 1:
        parts *= 2
    parts = min(parts, _most_parts(inputs))
    if not early():
        return Tiles(_OUTPUTS, 128, parts, stages=3, warps=4)
    shared = count * parts > PROCESSORS and rows > _SINGLE_TILE_ROWS // 2
    return Tiles(_OUTPUTS, 256, parts, 3 if shared else 4, 4, _AHEAD)


def _most_parts(inputs: int) -> int:
    """A power of two, at most 8, with two steps or more for each part."""
    return next((parts for parts in (8, 4, 2) if inputs >= parts * 512), 1)


def _scaled_blocks(
    values: Tensor, scales: Tensor, x: Rounded, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """`fp8_block_linear` by cuBLAS, which takes only multiples of four rows, and of four blocks of
    inputs: a weight with fewer has scales of blocks that are not there."""
    taken, rows = x.values, len(x.values)
    padded = -(-rows // 4) * 4
    columns = x.scales.new_ones(x.scales.shape[1], padded).t()
    if padded == rows and x.scales.stride() == columns.stride():
        columns = x.scales
    else:
        columns[:rows] = x.scales
        taken = functional.pad(taken.view(torch.uint8), (0, 0, 0, padded - rows)).view(taken.dtype)
    missing = -scales.shape[1] % 4
    of_blocks = functional.pad(scales, (0, missing)) if missing else scales
    out = functional.scaled_mm(
        taken,
        values.t(),
        columns,
        functional.ScalingType.BlockWise1x128,
        of_blocks.t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=out_dtype,
    )[:rows]
    return out if bias is None else out + bias
