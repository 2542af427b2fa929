"""Products of few rows, in FP8 or in 16 bits. Memory is nearly their only limit.

1. A program takes a tile of output channels and a part of the input, so that narrow weights have
   enough programs, too. Weights are the left operand of the tensor cores, rows the right one:
   both lie along the input, as `wgmma` wants FP8, and few rows waste little of it.
2. While the kernel before still runs, the program asks for its weights to be brought into the L2
   cache. Then it waits for the activations (programmatic dependent launch).
3. The parts of a tile are written apart. The last program to arrive adds them in their order, so a
   sum is the same every time. It sets the counter back for the next product.

Weights and activations come by the copy engine (TMA), which fills what lies beyond an edge with
zeros. So no size has to be a multiple of a tile's.

Tensor cores add FP8 products with about 14 bits. So the sums of a step's inputs are added in
float32, as DeepSeek-V3 does (arXiv 2412.19437, 3.3.2). Those of 16 bits they add in float32.
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
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.cuda.kernels import launch, pieces_of, power_of_2

LEAST_COLUMNS: Final = 16
"""Rows of the smallest product, to which fewer are padded."""
_MOST_TILES: Final = 4096
"""Counters of tiles that are cut along the input: more tiles than any weight has here."""
_REGISTERS_OF_SUMS: Final = 128
"""Registers of a thread for sums, of 255: the others hold weights on their way. With 32 or 64, 128
rows take up to 10 % longer; 256 are as good (`bench/README.md`, 2026-11-27)."""


class Tiles(NamedTuple):
    """How a product is cut."""

    outputs: int
    """Outputs of a program: 64 or a multiple of 128."""
    inputs: int
    """Inputs of a step of the loop."""
    parts: int
    """Parts of the input, a program for each."""
    stages: int
    """Steps whose loads are on their way."""
    warps: int
    ahead: int = 0
    """Inputs of each part that are asked for before the kernel before has ended. With 0 the product
    is launched after that, as any other kernel."""


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
def _sums(
    weights, activations, first, begin, end,
    padded_rows: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr, scaled: tl.constexpr,
):  # fmt: skip
    """The sums of a part of the input, [channels, rows]. Copies beyond an edge are zeros."""
    acc = tl.zeros((bn, padded_rows), tl.float32)
    for step in range(begin, end):
        weight = weights.load([first, step * bk])
        taken = activations.load([0, step * bk])
        if scaled:
            acc += tl.dot(weight, taken.T)
        else:
            acc = tl.dot(weight, taken.T, acc)
    return acc


@triton.jit(do_not_specialize=["rows", "x_row"])
def _few_rows(
    values,
    weights,
    scales,
    activations,
    x_scales,
    bias,
    out,
    partial,
    arrivals,
    rows,
    outputs,
    inputs,
    x_row,
    padded_rows: tl.constexpr,
    bn: tl.constexpr,
    bk: tl.constexpr,
    parts: tl.constexpr,
    at_once: tl.constexpr,
    ahead: tl.constexpr,
    item: tl.constexpr,
    scaled: tl.constexpr,
    has_bias: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    first = tile * bn
    channel, row = tl.arange(0, bn), tl.arange(0, padded_rows)
    seen = row < rows
    steps = tl.cdiv(inputs, bk)
    begin, end = part * steps // parts, (part + 1) * steps // parts
    if ahead > 0:
        gdc_launch_dependents()
        ours = values + tl.minimum(first + channel, outputs - 1).to(tl.int64) * inputs
        wanted = tl.minimum(ahead, tl.minimum(end * bk, inputs) - begin * bk)
        bring(ours + begin * bk, wanted * item)
        gdc_wait()
    acc = _sums(weights, activations, first, begin, end, padded_rows, bn, bk, scaled)
    if parts > 1:
        place = (tile * parts + part) * bn + channel
        places = partial + place[:, None] * padded_rows + row[None, :]
        tl.store(places, acc, mask=seen[None, :])
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != parts - 1:
            return
        acc = _sum_of_parts(places - part * bn * padded_rows, seen, parts, at_once)
        tl.store(arrivals + tile, 0)
    if scaled:
        acc = _scaled(acc, scales, x_scales, first + channel, row, rows, outputs, x_row)
    there = first + channel < outputs
    if has_bias:
        acc += tl.load(bias + first + channel, mask=there, other=0.0).to(tl.float32)[:, None]
    target = out + row[None, :] * outputs + (first + channel)[:, None]
    tl.store(target, acc, mask=there[:, None] & seen[None, :])


def few_rows(
    values: Tensor,
    scales: Tensor | None,
    x: Tensor,
    x_scales: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tiles: Tiles,
) -> Tensor:
    """The product of at most 128 rows, on one stream at a time.

    Args:
        values: [N, K] e4m3 or of 16 bits, contiguous; a row's bytes are a multiple of 16.
        scales: [N] float32, contiguous; None: there are none, of weights and of rows.
        x: [T, K], contiguous, in the dtype of `values`.
        x_scales: [T, 1] float32, with any strides.
        bias: [N], or None.
        out_dtype: of the result.
        tiles: how it is cut.

    Returns:
        [T, N]
    """
    (outputs, inputs), rows = values.shape, len(x)
    padded = max(LEAST_COLUMNS, power_of_2(rows))
    out = torch.empty(rows, outputs, dtype=out_dtype, device=x.device)
    count = pieces_of(outputs, tiles.outputs)
    part_shape = (count if tiles.parts > 1 else 0, tiles.parts, tiles.outputs, padded)
    partial = torch.empty(part_shape, dtype=torch.float32, device=x.device)
    scaled = scales is not None and x_scales is not None
    launch(
        _few_rows,
        (count, tiles.parts),
        values,
        TensorDescriptor.from_tensor(values, [tiles.outputs, tiles.inputs]),
        out if scales is None else scales,
        TensorDescriptor.from_tensor(x, [padded, tiles.inputs]),
        out if x_scales is None else x_scales,
        out if bias is None else bias,
        out,
        partial,
        _arrivals(x.device),
        rows,
        outputs,
        inputs,
        0 if x_scales is None else x_scales.stride(0),
        padded,
        tiles.outputs,
        tiles.inputs,
        tiles.parts,
        _parts_at_once(tiles, padded),
        tiles.ahead,
        values.element_size(),
        scaled,
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


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Programs of each tile that have stored their part. Zeros between two products."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
