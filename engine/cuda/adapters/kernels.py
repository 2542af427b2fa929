"""What adapters add to a product, for tokens of several at once, in two steps (Chen et al. 2023,
"Punica": shrink and expand).

Tokens are sorted by adapter and cut into tiles. A program computes for one tile, whose slot says
which pair it multiplies by. Tiles that a step does not fill are empty, so a graph holds as many as
a step may have. Ranks differ by slot: programs beyond a slot's rank do nothing.

The first kernel comes before the product, and the second behind it. Both start while the one before
them still runs (`engine.cuda.early`), and ask for their first weights then. Few tokens do not fill
the device, so the inputs are split among programs, and the second kernel adds their sums up. Sums
are float32.

Few tokens need no first kernel where A of all slots lies behind the product's weight
(`engine.cuda.adapters.additions`): the product computes what it would give as further outputs.

A product of gate and up need not be written again: the second kernel activates what it has added.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.kernels import launch, pieces_of, power_of_2

TILE: Final = 16
"""Ranks are padded to it, and so are few tokens: the least that a tensor core multiplies."""
LONG: Final = 512
"""From so many tokens on, a tile has 64. A layer of two prompts of 1,024 takes 2 % less so than
with tiles of 16; of 64 rows of eight adapters it took 79 % more with tiles of 64 (H200, 2026-11-27,
with other splits)."""
_SHARED: Final = 160_000
"""Bytes of shared memory for what a program of `_shrink` loads. A Hopper gives a program 232,448,
and the compiler puts more into it than that."""
BLOCK_N: Final = 64
"""Outputs of a program. Not tuned."""
_SPLITS: Final = ((66, 4),)
"""Up to so many tiles, inputs are split among so many programs. 4 and 64 rows take 15 and 7 % less
so than with 16 for few tiles (H200, 2026-11-27)."""
_MOST_COLUMNS: Final = 64
"""Columns of a program's sums, of all parts: with more, splits do not fit into shared memory."""


class Tiles(NamedTuple):
    """Tokens by adapter."""

    order: Tensor
    """[T] int32: tokens, those of one adapter together."""
    tiles: Tensor
    """[N, 3] int32: slot, place of the first token in `order`, number of tokens; slot -1: tokens
    without an adapter."""
    size: int
    """Most tokens of a tile."""


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
    ends: Tensor
    """[P] int32: the end of each part's outputs."""
    aligned: int
    """What divides all these, at most 16. Else a program reads and writes single numbers."""

    @property
    def parts(self) -> int:
        """P."""
        return self.scales.shape[1]

    @property
    def columns(self) -> int:
        """Ranks that a program takes at once."""
        most: int = power_of_2(self.b.shape[2])
        parts: int = power_of_2(self.parts)
        return min(most, _MOST_COLUMNS // parts)


class Low(NamedTuple):
    """What a product's inputs became, not added up."""

    values: Tensor
    """float32 memory for splits * T * P * M numbers. Without splits: [T, slots * P * M], of all
    slots and not sorted, in the model's dtype."""
    splits: int
    """0: they need not be added up."""
    stride: int
    """Numbers of a split: T * P * M; without splits, from a token to the next."""


def size_of(tokens: int) -> int:
    """Most tokens of a tile."""
    return TILE if tokens < LONG else 4 * TILE


def splits_of(programs: int) -> int:
    """Programs among which the inputs of each are split."""
    return next((split for most, split in _SPLITS if programs <= most), 1)


@triton.jit
def _of_a(a, slot, row, exists, inner, end, inputs, width: tl.constexpr):
    """A^T of some columns, for these inputs."""
    place = a + (slot.to(tl.int64) * width + row[None, :]) * inputs + inner[:, None]
    return tl.load(place, mask=exists[None, :] & (inner < end)[:, None], other=0.0)


@triton.jit
def _of_b(b, slot, output, end, r, outputs, most: tl.constexpr, columns: tl.constexpr):
    """B^T of some ranks, for these outputs."""
    inner = r + tl.arange(0, columns)
    place = b + (slot.to(tl.int64) * outputs + output[None, :]) * most + inner[:, None]
    return tl.load(place, mask=(inner < most)[:, None] & (output < end)[None, :], other=0.0)


@triton.jit
def _of_x(x, rows, inside, inner, end, x_stride):
    place = x + rows[:, None] * x_stride + inner[None, :]
    return tl.load(place, mask=inside[:, None] & (inner < end)[None, :], other=0.0)


@triton.jit
def _of_low(
    low, slot, place, rows, inside, part, r, low_stride,
    parts: tl.constexpr, most: tl.constexpr, columns: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """The sums of all splits, for some ranks of a part."""
    inner = r + tl.arange(0, columns)
    mask = inside[:, None] & (inner < most)[None, :]
    own = tl.zeros((place.shape[0], columns), tl.float32)
    if splits == 0:
        first = (slot * parts + part) * most
        source = low + rows[:, None] * low_stride + first + inner[None, :]
        own += tl.load(source, mask=mask, other=0.0)
    source = low + place[:, None] * (parts * most) + part * most + inner[None, :]
    for split in tl.static_range(splits):
        own += tl.load(source + split * low_stride, mask=mask, other=0.0)
    return own


@triton.jit
def _tile(tiles, order, ranks, number, tile: tl.constexpr):
    """Slot, rank (0: there is nothing to add), places of tokens in `order`, which exist, and the
    tokens."""
    slot = tl.load(tiles + 3 * number)
    first = tl.load(tiles + 3 * number + 1)
    count = tl.load(tiles + 3 * number + 2)
    rank = tl.load(ranks + tl.maximum(slot, 0))
    rank = tl.where(slot >= 0, rank, 0)
    at = tl.arange(0, tile)
    rows = tl.load(order + first + at, mask=at < count, other=0).to(tl.int64)
    return tl.maximum(slot, 0), rank, first + at, at < count, rows


@triton.jit
def _shrink(
    x, a, low, order, tiles, ranks, inputs, x_stride, split_inputs, low_stride,
    parts: tl.constexpr, most: tl.constexpr, columns: tl.constexpr, wide: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """`wide`: columns of all parts."""
    if pdl:
        gdc_launch_dependents()
    first_rank, split = tl.program_id(1) * columns, tl.program_id(2)
    width: tl.constexpr = parts * most
    slot, rank, place, inside, rows = _tile(tiles, order, ranks, tl.program_id(0), tile)
    column = tl.arange(0, wide)
    row = column // columns * most + first_rank + column % columns
    exists = (column // columns < parts) & (first_rank + column % columns < most)
    begin = split * split_inputs
    end = tl.minimum(begin + split_inputs, inputs)
    inner = begin + tl.arange(0, block)
    weight = _of_a(a, slot, row, exists & (first_rank < rank), inner, end, inputs, width)
    if pdl:
        gdc_wait()
    if first_rank < rank:
        own = _of_x(x, rows, inside, inner, end, x_stride)
        sums = tl.dot(own.to(weight.dtype), weight, input_precision="ieee")
        for k in range(begin + block, end, block):
            inner = k + tl.arange(0, block)
            weight = _of_a(a, slot, row, exists, inner, end, inputs, width)
            own = _of_x(x, rows, inside, inner, end, x_stride)
            sums = tl.dot(own.to(weight.dtype), weight, sums, input_precision="ieee")
        target = low + split * low_stride + place[:, None] * width + row[None, :]
        tl.store(target, sums, mask=inside[:, None] & exists[None, :])


@triton.jit
def _sums(
    low, b, weight, slot, rank, place, rows, inside, part, output, end, outputs, low_stride,
    parts: tl.constexpr, most: tl.constexpr, columns: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """What is added, not scaled; `weight` is B of the first ranks."""
    own = _of_low(
        low, slot, place, rows, inside, part, 0, low_stride, parts, most, columns, splits
    )  # fmt: skip
    sums = tl.dot(own.to(weight.dtype), weight, input_precision="ieee")
    if most > columns:
        for r in tl.range(columns, rank, columns, num_stages=1):  # More take all shared memory.
            own = _of_low(
                low, slot, place, rows, inside, part, r, low_stride, parts, most, columns, splits
            )  # fmt: skip
            more = _of_b(b, slot, output, end, r, outputs, most, columns)
            sums = tl.dot(own.to(weight.dtype), more, sums, input_precision="ieee")
    return sums


@triton.jit
def _expand(
    low, b, product, out, order, tiles, ranks, scales, blocks, outputs, product_stride, out_stride,
    low_stride,
    parts: tl.constexpr, most: tl.constexpr, columns: tl.constexpr, splits: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """Without splits, `out` is not `product`, and gets what has no adapter, too."""
    if pdl:
        gdc_launch_dependents()
    slot, rank, place, inside, rows = _tile(tiles, order, ranks, tl.program_id(1), tile)
    own = blocks + 3 * tl.program_id(0)
    part = tl.load(own)
    begin = tl.multiple_of(tl.load(own + 1), aligned)
    end = tl.multiple_of(tl.load(own + 2), aligned)
    scale = tl.load(scales + slot * parts + part)
    output = begin + tl.arange(0, block)
    some = tl.where(rank > 0, end, 0)
    weight = _of_b(b, slot, output, some, 0, outputs, most, columns)
    if pdl:
        gdc_wait()
    exists = inside[:, None] & (output < end)[None, :]
    if splits > 0:
        exists = exists & (rank > 0)
    value = tl.load(product + rows[:, None] * product_stride + output[None, :], exists, other=0.0)
    if rank > 0:
        sums = _sums(
            low, b, weight, slot, rank, place, rows, inside, part, output, end, outputs,
            low_stride, parts, most, columns, splits,
        )  # fmt: skip
        added = (sums * scale).to(value.dtype).to(tl.float32)
        value = (value.to(tl.float32) + added).to(value.dtype)
    tl.store(out + rows[:, None] * out_stride + output[None, :], value, exists)


@triton.jit
def _expand_gated(
    low, b, both, out, order, tiles, ranks, scales, size, both_stride, low_stride,
    parts: tl.constexpr, most: tl.constexpr, columns: tl.constexpr, splits: tl.constexpr,
    tile: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of gate and up with what is added. Of tokens without an adapter, too."""
    if pdl:
        gdc_launch_dependents()
    slot, rank, place, inside, rows = _tile(tiles, order, ranks, tl.program_id(1), tile)
    scale = tl.load(scales + slot * parts)
    up_scale = tl.load(scales + slot * parts + parts - 1)
    output = tl.program_id(0) * block + tl.arange(0, block)
    some, up_some = tl.where(rank > 0, size, 0), tl.where(rank > 0, 2 * size, 0)
    weight = _of_b(b, slot, output, some, 0, 2 * size, most, columns)
    up_weight = _of_b(b, slot, output + size, up_some, 0, 2 * size, most, columns)
    dtype: tl.constexpr = out.dtype.element_ty
    exists = inside[:, None] & (output < size)[None, :]
    source = both + rows[:, None] * both_stride + output[None, :]
    if pdl:
        gdc_wait()
    gate = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(source + size, mask=exists, other=0.0).to(tl.float32)
    if rank > 0:
        sums = _sums(
            low, b, weight, slot, rank, place, rows, inside, 0, output, size, 2 * size,
            low_stride, parts, most, columns, splits,
        )  # fmt: skip
        gate = (gate + (sums * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        sums = _sums(
            low, b, up_weight, slot, rank, place, rows, inside, parts - 1, output + size, 2 * size,
            2 * size, low_stride, parts, most, columns, splits,
        )  # fmt: skip
        up = (up + (sums * up_scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + rows[:, None] * size + output[None, :], (activated * up).to(dtype), exists)


def shrink(x: Tensor, pairs: Pairs, own: Tiles, values: Tensor) -> Low:
    """The first step, of [T, K], in memory of `Low`."""
    inputs, number = pairs.a.shape[2], len(own.tiles)
    columns, most = pairs.columns, pairs.b.shape[2]
    wide = power_of_2(pairs.parts) * columns
    blocks = pieces_of(most, columns)
    splits, block = splits_of(number), _block_of(own.size, wide, x.element_size())
    split_inputs = pieces_of(pieces_of(inputs, block), splits) * block
    low = Low(values, splits, len(own.order) * pairs.parts * most)
    launch(
        _shrink,
        (number, blocks, splits),
        x,
        pairs.a,
        values,
        own.order,
        own.tiles,
        pairs.ranks,
        inputs,
        x.stride(0),
        split_inputs,
        low.stride,
        pairs.parts,
        most,
        columns,
        wide,
        own.size,
        block,
        early(),
        launch_pdl=early(),
    )
    return low


def _block_of(tile: int, wide: int, item: int) -> int:
    """Inputs that a program of `_shrink` multiplies at once: three such steps are on their way."""
    return next(size for size in (256, 128, 64, 32) if 3 * size * (tile + wide) * item <= _SHARED)


def _of_sums(pairs: Pairs, own: Tiles, low: Low) -> tuple[int, ...]:
    """What both kernels of the second step are told of the first one and of their shape."""
    shape = low.stride, pairs.parts, pairs.b.shape[2], pairs.columns, low.splits
    return (*shape, own.size, BLOCK_N, early())


def expand(product: Tensor, pairs: Pairs, own: Tiles, low: Low) -> Tensor:
    """The second step: [T, outputs] with what is added, in place. Without splits it is a tensor of
    its own, and contiguous."""
    outputs = pairs.b.shape[1]
    out = product if low.splits else product.new_empty(len(product), outputs)
    launch(
        _expand,
        (len(pairs.blocks), len(own.tiles)),
        low.values,
        pairs.b,
        product,
        out,
        own.order,
        own.tiles,
        pairs.ranks,
        pairs.scales,
        pairs.blocks,
        outputs,
        product.stride(0),
        out.stride(0),
        *_of_sums(pairs, own, low),
        pairs.aligned,
        launch_pdl=early(),
    )
    return out


def expand_gated(both: Tensor, pairs: Pairs, own: Tiles, low: Low) -> Tensor:
    """The second step for [T, 2 I], gate then up: silu(gate) * up, [T, I]."""
    size = pairs.b.shape[1] // 2
    out = both.new_empty(len(both), size)
    launch(
        _expand_gated,
        (pieces_of(size, BLOCK_N), len(own.tiles)),
        low.values,
        pairs.b,
        both,
        out,
        own.order,
        own.tiles,
        pairs.ranks,
        pairs.scales,
        size,
        both.stride(0),
        *_of_sums(pairs, own, low),
        launch_pdl=early(),
    )
    return out
