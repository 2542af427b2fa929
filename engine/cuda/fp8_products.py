"""Products of FP8 weights with FP8 activations. Of few rows, memory is the only limit.

1. A program takes a tile of output channels and a part of the input, so that narrow weights have
   enough programs, too. Weights are the left operand of the tensor cores, rows the right one:
   both lie along the input, as `wgmma` wants FP8, and few rows waste little of it.
2. While the kernel before still runs, the program asks for its weights to be brought into the L2
   cache. Then it waits for the activations (programmatic dependent launch).
3. The parts of a tile are written apart. The last program to arrive adds them in their order, so a
   sum is the same every time. It sets the counter back for the next product.

Tensor cores add FP8 products with about 14 bits. So the sums of 128 inputs are added in float32,
as DeepSeek-V3 does (arXiv 2412.19437, 3.3.2).

From `FEW_ROWS` on, arithmetic limits, and the product is cuBLAS's.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.cuda.kernels import launch

FEW_ROWS: Final = 64
"""The most rows of a product of our own."""
BLOCK: Final = 128
"""Inputs and outputs with one scale, where a weight has scales by blocks."""
LEAST_COLUMNS: Final = 16
"""Rows of the smallest product, to which fewer are padded."""
_MOST_TILES: Final = 4096
_REGISTERS_OF_SUMS: Final = 128
_PROGRAMS: Final = 264
_LEAST_STEPS: Final = 4
_MOST_PARTS: Final = 8


class Tiles(NamedTuple):
    """How a product is cut."""

    outputs: int
    """Of a program: 64 or a multiple of 128. By blocks of scales 64 or 128."""
    inputs: int
    """Of a step. By blocks of scales 128."""
    parts: int
    """Of the input, a program for each."""
    stages: int
    """Steps whose loads are on their way."""
    warps: int
    ahead: int = 0
    """Inputs of each part that are asked for before the kernel before has ended. With 0 the product
    is launched after that, as any other kernel."""
    described: bool = True
    """Loads are the copy engine's (TMA)."""


@triton.jit
def bring(pointers, size):
    """Asks for `size` bytes at each pointer, a multiple of 16, to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [pointers, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _sum_of_parts(places, seen, parts: tl.constexpr, at_once: tl.constexpr):
    """The sums of all parts, added in their order; `places` are those of the first."""
    size: tl.constexpr = places.shape[0] * places.shape[1]
    total = tl.zeros(places.shape, tl.float32)
    for part in tl.range(0, parts, loop_unroll_factor=at_once):
        mask = seen[None, :]
        total += tl.load(places + part * size, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _scaled(acc, scales, x_scales, channel, row, rows, outputs, x_scales_row):
    """Sums by the scales of their channels and rows."""
    acc *= tl.load(scales + channel, mask=channel < outputs, other=0.0)[:, None]
    return acc * tl.load(x_scales + row * x_scales_row, mask=row < rows, other=0.0)[None, :]


@triton.jit
def _few_rows(
    values,
    described_values,
    scales,
    x,
    described_x,
    x_scales,
    bias,
    out,
    partial,
    arrivals,
    rows,
    outputs,
    inputs,
    x_scales_row,
    x_scales_step,
    padded_rows: tl.constexpr,
    bn: tl.constexpr,
    bk: tl.constexpr,
    parts: tl.constexpr,
    at_once: tl.constexpr,
    ahead: tl.constexpr,
    described: tl.constexpr,
    by_blocks: tl.constexpr,
    has_bias: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    first = tile * bn
    channel, row = tl.arange(0, bn), tl.arange(0, padded_rows)
    steps = tl.cdiv(inputs, bk)
    begin, end = part * steps // parts, (part + 1) * steps // parts
    weights = values + tl.minimum(first + channel, outputs - 1).to(tl.int64) * inputs
    if ahead > 0:
        gdc_launch_dependents()
        bring(weights + begin * bk, tl.minimum(ahead, tl.minimum(end * bk, inputs) - begin * bk))
        gdc_wait()
    seen = (row < rows)[:, None]
    acc = tl.zeros((bn, padded_rows), tl.float32)
    for step in range(begin, end):
        k = step * bk + tl.arange(0, bk)
        if described:
            weight = described_values.load([first, step * bk])
            taken = described_x.load([0, step * bk])
        else:
            inside = (k < inputs)[None, :]
            weight = tl.load(weights[:, None] + k[None, :], mask=inside, other=0.0)
            taken = tl.load(x + row[:, None] * inputs + k[None, :], mask=seen & inside, other=0.0)
        if by_blocks:
            of_block = tl.load(scales + first // 128 * steps + step)
            of_rows = x_scales + row * x_scales_row + step * x_scales_step
            of_rows = tl.load(of_rows, mask=row < rows, other=0.0)
            acc += tl.dot(weight, taken.T) * (of_block * of_rows)[None, :]
        else:
            acc += tl.dot(weight, taken.T)
    if parts > 1:
        place = (tile * parts + part) * bn + channel
        places = partial + place[:, None] * padded_rows + row[None, :]
        tl.store(places, acc, mask=row[None, :] < rows)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != parts - 1:
            return
        acc = _sum_of_parts(places - part * bn * padded_rows, row < rows, parts, at_once)
        tl.store(arrivals + tile, 0)
    if not by_blocks:
        acc = _scaled(acc, scales, x_scales, first + channel, row, rows, outputs, x_scales_row)
    there = first + channel < outputs
    if has_bias:
        acc += tl.load(bias + first + channel, mask=there, other=0.0).to(tl.float32)[:, None]
    target = out + row[None, :] * outputs + (first + channel)[:, None]
    tl.store(target, acc, mask=there[:, None] & (row < rows)[None, :])


def few_rows(
    values: Tensor,
    scales: Tensor,
    x: Tensor,
    x_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tiles: Tiles,
) -> Tensor:
    """The product of at most 128 rows, by our own kernel, on one stream at a time.

    Args:
        values: [N, K] e4m3, contiguous; K is a multiple of 16.
        scales: [N] float32, or [N / 128, K / 128], contiguous (rounded up).
        x: [T, K] e4m3, contiguous.
        x_scales: [T, 1] float32, or [T, K / 128], with any strides.
        bias: [N], or None.
        out_dtype: of the result.
        tiles: how it is cut.

    Returns:
        [T, N]
    """
    (outputs, inputs), rows = values.shape, len(x)
    padded = max(LEAST_COLUMNS, triton.next_power_of_2(rows))
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    count = triton.cdiv(outputs, tiles.outputs)
    part_shape = (count if tiles.parts > 1 else 0, tiles.parts, tiles.outputs, padded)
    partial = torch.empty(part_shape, dtype=torch.float32, device=x.device)
    described = (
        (
            TensorDescriptor.from_tensor(values, [tiles.outputs, tiles.inputs]),
            TensorDescriptor.from_tensor(x, [padded, tiles.inputs]),
        )
        if tiles.described
        else (values, x)
    )
    launch(
        _few_rows,
        (count, tiles.parts),
        values,
        described[0],
        scales,
        x,
        described[1],
        x_scales,
        out if bias is None else bias,
        out,
        partial,
        _arrivals(x.device),
        rows,
        outputs,
        inputs,
        x_scales.stride(0),
        x_scales.stride(1),
        padded,
        tiles.outputs,
        tiles.inputs,
        tiles.parts,
        _parts_at_once(tiles, padded),
        tiles.ahead,
        tiles.described,
        scales.dim() == 2,
        bias is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        launch_pdl=tiles.ahead > 0,
    )
    return out


def _parts_at_once(tiles: Tiles, padded_rows: int) -> int:
    """Parts whose sums the last program loads at the same time, as its registers allow."""
    sums_of_a_thread = tiles.outputs * padded_rows // (32 * tiles.warps)
    fit = max(1, _REGISTERS_OF_SUMS // sums_of_a_thread)
    return max(count for count in range(1, min(fit, tiles.parts) + 1) if tiles.parts % count == 0)


def fp8_linear(
    values: Tensor,
    scales: Tensor,
    x: Tensor,
    x_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product of rows with a weight whose output channels have a scale each.

    Args:
        values: [N, K] e4m3, contiguous; N and K are multiples of 16.
        scales: [N] float32.
        x: [T, K] e4m3, contiguous.
        x_scales: [T, 1] float32, contiguous.
        bias: [N] in `out_dtype`, or None.
        out_dtype: bfloat16 or float16.

    Returns:
        [T, N]
    """
    (outputs, inputs), rows = values.shape, len(x)
    if rows <= FEW_ROWS:
        tiles = tiles_of(outputs, inputs, rows)
        return few_rows(values, scales, x, x_scales, bias, out_dtype, tiles)
    return _scaled_rows(values, scales, x, x_scales, bias, out_dtype)


def _scaled_rows(
    values: Tensor,
    scales: Tensor,
    x: Tensor,
    x_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`fp8_linear` by cuBLAS."""
    weight, columns = values.t(), scales.view(1, -1)
    if not hasattr(functional, "scaled_mm"):  # torch before 2.10
        return torch._scaled_mm(
            x, weight, x_scales, columns, bias, out_dtype=out_dtype, use_fast_accum=True
        )
    recipe = functional.ScalingType.RowWise
    return functional.scaled_mm(
        x,
        weight,
        x_scales,
        recipe,
        columns,
        recipe,
        bias=bias,
        output_dtype=out_dtype,
        use_fast_accum=True,
    )


def fp8_block_linear(
    values: Tensor,
    scales: Tensor,
    x: Tensor,
    x_scales: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product of rows with a weight whose blocks of 128 x 128 have a scale each.

    Args:
        values: [N, K] e4m3, contiguous; both are multiples of 128.
        scales: [N / 128, K / 128] float32, contiguous.
        x: [T, K] e4m3, contiguous.
        x_scales: [T, K / 128] float32. Best column after column with space for a multiple of four
            rows, as `engine.cuda.rounding` leaves them; others are copied.
        bias: [N] in `out_dtype`, or None.
        out_dtype: bfloat16 or float16.

    Returns:
        [T, N]
    """
    (outputs, inputs), rows = values.shape, len(x)
    if rows <= FEW_ROWS:
        tiles = tiles_of(outputs, inputs, rows)
        return few_rows(values, scales, x, x_scales, bias, out_dtype, tiles)
    padded = -(-rows // 4) * 4  # cuBLAS takes no other numbers of rows.
    columns = x_scales.new_ones(x_scales.shape[1], padded).t()
    if padded == rows and x_scales.stride() == columns.stride():
        columns = x_scales
    else:
        columns[:rows] = x_scales
        x = functional.pad(x.view(torch.uint8), (0, 0, 0, padded - rows)).view(x.dtype)
    out = functional.scaled_mm(
        x,
        values.t(),
        columns,
        functional.ScalingType.BlockWise1x128,
        scales.t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=out_dtype,
    )[:rows]
    return out if bias is None else out + bias


def tiles_of(outputs: int, inputs: int, rows: int) -> Tiles:
    """How a product of at most `FEW_ROWS` rows is cut."""
    width = 128
    count = triton.cdiv(outputs, width)
    steps = triton.cdiv(inputs, BLOCK)
    parts = max(1, min(_PROGRAMS // count, steps // _LEAST_STEPS, _MOST_PARTS))
    return Tiles(width, BLOCK, parts, stages=4, warps=4)


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Programs of each tile that have stored their part. Zeros between two products."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
