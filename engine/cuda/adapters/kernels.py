"""What adapters add to a product, for tokens of several at once, in two steps (Chen et al. 2023,
"Punica": shrink and expand).

Tokens are sorted by adapter and cut into tiles of 16. A program computes for one tile, whose slot
says which pair it multiplies by. Tiles that a step does not fill have no slot, so a graph holds as
many as a step may have. Ranks differ by slot: programs beyond a slot's rank do nothing.

Few tokens do not fill the device, so the inputs are split among programs, and the second kernel
adds their sums up. Sums are float32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch

TILE: Final = 16
"""Tokens of a tile, and ranks of a program: the least that a tensor core multiplies."""
_BLOCK_K: Final = 128
"""Inputs that a program multiplies at once. Not tuned."""
BLOCK_N: Final = 64
"""Outputs of a program. Not tuned."""
_SPLITS: Final = ((8, 16), (32, 4))
"""Up to so many tiles, inputs are split among so many programs. Not tuned."""


class Tiles(NamedTuple):
    """Tokens by adapter."""

    order: Tensor
    """[T] int32: tokens, those of one adapter together."""
    tiles: Tensor
    """[N, 3] int32: slot, place of the first token in `order`, number of tokens; slot -1: none."""


class Pairs(NamedTuple):
    """The pairs of all slots for one product of P parts, ranks padded to M."""

    a: Tensor
    """[slots, P * M, K]"""
    b: Tensor
    """[slots, outputs, M]"""
    scales: Tensor
    """[slots, P] float32"""
    ranks: Tensor
    """[slots] int32; 0: the adapter has no pair here."""
    blocks: Tensor
    """[B, 3] int32: part, first output and end of each `BLOCK_N` outputs, which no part crosses."""


def splits_of(tiles: int) -> int:
    """Programs among which the inputs of each tile are split."""
    return next((split for most, split in _SPLITS if tiles <= most), 1)


@triton.jit
def _shrink(
    x,
    a,
    low,
    order,
    tiles,
    ranks,
    inputs,
    x_stride,
    split_inputs,
    low_stride,
    width: tl.constexpr,
    most: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    number, first_rank = tl.program_id(0), tl.program_id(1) * tile
    split = tl.program_id(2)
    slot = tl.load(tiles + 3 * number)
    rank = tl.load(ranks + tl.maximum(slot, 0))
    if (slot >= 0) & (first_rank % most < rank):
        first = tl.load(tiles + 3 * number + 1)
        count = tl.load(tiles + 3 * number + 2)
        at = tl.arange(0, tile)
        rows = tl.load(order + first + at, mask=at < count, other=0).to(tl.int64)
        pair = a + (slot.to(tl.int64) * width + first_rank + at[None, :]) * inputs
        sums = tl.zeros((tile, tile), tl.float32)
        begin = split * split_inputs
        for k in range(begin, tl.minimum(begin + split_inputs, inputs), block):
            inner = k + tl.arange(0, block)
            exists = inner < inputs
            own = tl.load(
                x + rows[:, None] * x_stride + inner[None, :],
                mask=(at < count)[:, None] & exists[None, :],
                other=0.0,
            )
            weight = tl.load(pair + inner[:, None], mask=exists[:, None], other=0.0)
            sums = tl.dot(own.to(weight.dtype), weight, sums, input_precision="ieee")
        target = low + split * low_stride + (first + at)[:, None] * width
        tl.store(target + first_rank + at[None, :], sums, mask=(at < count)[:, None])


@triton.jit
def _expand(
    low,
    b,
    out,
    order,
    tiles,
    ranks,
    scales,
    blocks,
    outputs,
    out_stride,
    low_stride,
    parts: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
    splits: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    number, place = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + 3 * number)
    if slot >= 0:
        first = tl.load(tiles + 3 * number + 1)
        count = tl.load(tiles + 3 * number + 2)
        part = tl.load(blocks + 3 * place)
        begin = tl.load(blocks + 3 * place + 1)
        end = tl.load(blocks + 3 * place + 2)
        rank = tl.load(ranks + slot)
        scale = tl.load(scales + slot * parts + part)
        at, columns = tl.arange(0, tile), begin + tl.arange(0, block)
        pair = b + (slot.to(tl.int64) * outputs + columns[None, :]) * most
        sums = tl.zeros((tile, block), tl.float32)
        for r in range(0, rank, tile):
            inner = r + tl.arange(0, tile)
            source = low + (first + at)[:, None] * width + part * most + inner[None, :]
            own = tl.zeros((tile, tile), tl.float32)
            for split in tl.static_range(splits):
                own += tl.load(source + split * low_stride, mask=(at < count)[:, None], other=0.0)
            weight = tl.load(pair + inner[:, None], mask=(columns < end)[None, :], other=0.0)
            sums = tl.dot(own.to(weight.dtype), weight, sums, input_precision="ieee")
        rows = tl.load(order + first + at, mask=at < count, other=0).to(tl.int64)
        target = out + rows[:, None] * out_stride + columns[None, :]
        exists = (at < count)[:, None] & (columns < end)[None, :]
        before = tl.load(target, mask=exists, other=0.0)
        added = (sums * scale).to(before.dtype)
        tl.store(target, (before.to(tl.float32) + added.to(tl.float32)).to(before.dtype), exists)


def add_pairs(x: Tensor, out: Tensor, pairs: Pairs, own: Tiles, low: Tensor) -> None:
    """Adds to a product.

    Args:
        x: [T, K].
        out: [T, outputs], added to.
        pairs: of the product.
        own: the tokens.
        low: float32 memory for splits * T * P * M numbers.
    """
    (_, width, inputs), (_, outputs, most) = pairs.a.shape, pairs.b.shape
    number, splits = len(own.tiles), splits_of(len(own.tiles))
    split_inputs = triton.cdiv(triton.cdiv(inputs, _BLOCK_K), splits) * _BLOCK_K
    low_stride = len(own.order) * width
    launch(
        _shrink,
        (number, width // TILE, splits),
        x,
        pairs.a,
        low,
        *own,
        pairs.ranks,
        inputs,
        x.stride(0),
        split_inputs,
        low_stride,
        width,
        most,
        TILE,
        _BLOCK_K,
    )
    launch(
        _expand,
        (number, len(pairs.blocks)),
        low,
        pairs.b,
        out,
        *own,
        pairs.ranks,
        pairs.scales,
        pairs.blocks,
        outputs,
        out.stride(0),
        low_stride,
        width // most,
        width,
        most,
        splits,
        TILE,
        BLOCK_N,
    )
