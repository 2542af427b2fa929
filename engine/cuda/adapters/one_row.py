"""What adapters add to the product of one row, which memory alone limits.

A small kernel computes what the pair's first half gives. It starts when all before have ended, and
lets the product start at once: that reads the row and its weights meanwhile, and waits for the
small kernel only before it writes. So what is added costs no pass over the outputs of its own.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.adapters.kernels import Pairs, Tiles
from engine.cuda.early import early
from engine.cuda.kernels import launch, power_of_2
from engine.cuda.products.single_row import block_of, part_of

_AHEAD: Final = 4096
"""Most inputs whose weights a program asks for first: 32 of each thread."""


@triton.jit
def _adapter(tiles, ranks):
    """Slot and rank of the row; rank 0: there is nothing to add."""
    slot = tl.load(tiles)
    rank = tl.load(ranks + tl.maximum(slot, 0))
    return tl.maximum(slot, 0).to(tl.int64), tl.where(slot >= 0, rank, 0)


@triton.jit
def _asked(row, inputs: tl.constexpr, ahead: tl.constexpr):
    """The first values of a row of a weight. They come while a program waits for its slot and what
    lies there."""
    at = tl.arange(0, ahead)
    if ahead <= inputs:
        values = tl.load(row + at)
    else:
        values = tl.load(row + at, mask=at < inputs, other=0.0)
    return values


@triton.jit
def _product(
    x, weight, first, inputs: tl.constexpr, ahead: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """The row by a row of a weight, whose `first` values have been asked for."""
    total = 0.0
    if ahead < inputs:
        rest = tl.zeros((block,), tl.float32)
        for start in range(ahead, inputs, block):
            rest += part_of(x, start, inputs, block) * part_of(weight, start, inputs, block)
        total += tl.sum(rest)
    return total + tl.sum(part_of(x, 0, inputs, ahead) * first.to(tl.float32))


@triton.jit
def _shrink_row(
    x, a, low, tiles, ranks, width: tl.constexpr, most: tl.constexpr, inputs: tl.constexpr,
    ahead: tl.constexpr, block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
    column = tl.program_id(0)
    slot, rank = _adapter(tiles, ranks)
    if column % most < rank:
        own = a + (slot * width + column) * inputs
        first = _asked(own, inputs, ahead)
        tl.store(low + column, _product(x, own, first, inputs, ahead, block))


@triton.jit
def _of_pair(b, scales, ends, slot, rank, output, outputs, parts: tl.constexpr,
             most: tl.constexpr, columns: tl.constexpr):  # fmt: skip
    """B of one output, its scale, and the part that it belongs to."""
    r = tl.arange(0, columns)
    part = 0
    for each in tl.static_range(parts - 1):
        part += (output >= tl.load(ends + each)).to(tl.int32)
    weight = tl.load(b + (slot * outputs + output) * most + r, mask=r < rank, other=0.0)
    return weight, tl.load(scales + slot * parts + part), part


@triton.jit
def _with_added(total, low, weight, scale, part, rank, most: tl.constexpr, columns: tl.constexpr):
    """An output with what is added, rounded where `engine.model.adapters.sites` does."""
    r = tl.arange(0, columns)
    dtype: tl.constexpr = weight.dtype
    own = tl.load(low + part * most + r, mask=r < rank, other=0.0).to(dtype).to(tl.float32)
    added = (tl.sum(own * weight.to(tl.float32)) * scale).to(dtype).to(tl.float32)
    return (total.to(dtype).to(tl.float32) + added).to(dtype)


@triton.jit
def _dot(
    x, weight, bias, out, low, b, scales, ends, tiles, ranks, outputs,
    inputs: tl.constexpr, parts: tl.constexpr, most: tl.constexpr, columns: tl.constexpr,
    ahead: tl.constexpr, block: tl.constexpr, has_bias: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
    output = tl.program_id(0).to(tl.int64)
    row = weight + output * inputs
    first = _asked(row, inputs, ahead)
    slot, rank = _adapter(tiles, ranks)
    own, scale, part = _of_pair(
        b, scales, ends, slot, rank, output, outputs, parts, most, columns
    )  # fmt: skip
    total = _product(x, row, first, inputs, ahead, block)
    if has_bias:
        total += tl.load(bias + output).to(tl.float32)
    if pdl:
        gdc_wait()
    tl.store(out + output, _with_added(total, low, own, scale, part, rank, most, columns))


@triton.jit
def _gated_dot(
    x, weight, bias, out, low, b, scales, ends, tiles, ranks, size,
    inputs: tl.constexpr, parts: tl.constexpr, most: tl.constexpr, columns: tl.constexpr,
    ahead: tl.constexpr, block: tl.constexpr, has_bias: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up; `size`: outputs of each."""
    if pdl:
        gdc_launch_dependents()
    output = tl.program_id(0).to(tl.int64)
    gate_row, up_row = weight + output * inputs, weight + (output + size) * inputs
    gates, ups = _asked(gate_row, inputs, ahead), _asked(up_row, inputs, ahead)
    slot, rank = _adapter(tiles, ranks)
    of_gate, gate_scale, gate_part = _of_pair(
        b, scales, ends, slot, rank, output, 2 * size, parts, most, columns
    )  # fmt: skip
    of_up, up_scale, up_part = _of_pair(
        b, scales, ends, slot, rank, output + size, 2 * size, parts, most, columns
    )  # fmt: skip
    gate, up = 0.0, 0.0
    if ahead < inputs:
        more_gates, more_ups = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
        for start in range(ahead, inputs, block):
            more = part_of(x, start, inputs, block)
            more_gates += more * part_of(gate_row, start, inputs, block)
            more_ups += more * part_of(up_row, start, inputs, block)
        gate += tl.sum(more_gates)
        up += tl.sum(more_ups)
    value = part_of(x, 0, inputs, ahead)
    gate += tl.sum(value * gates.to(tl.float32))
    up += tl.sum(value * ups.to(tl.float32))
    if has_bias:
        gate += tl.load(bias + output).to(tl.float32)
        up += tl.load(bias + output + size).to(tl.float32)
    if pdl:
        gdc_wait()
    gate = _with_added(gate, low, of_gate, gate_scale, gate_part, rank, most, columns)
    up = _with_added(up, low, of_up, up_scale, up_part, rank, most, columns)
    gate = gate.to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(up.dtype).to(tl.float32)
    tl.store(out + output, (activated * up.to(tl.float32)).to(up.dtype))


def one_row(
    x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs, own: Tiles, low: Tensor
) -> Tensor:
    """[1, K] -> [1, outputs]: the product with what is added. `weight` has the dtype of the pairs;
    `low` is float32 memory for P * M numbers."""
    return _launched(_dot, len(weight), x, weight, bias, pairs, own, low)


def one_row_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs, own: Tiles, low: Tensor
) -> Tensor:
    """[1, K] -> [1, I], of a weight of gate and up: silu(gate) * up. See `one_row`."""
    return _launched(_gated_dot, len(weight) // 2, x, weight, bias, pairs, own, low)


def _launched(
    kernel: object,
    outputs: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pairs: Pairs,
    own: Tiles,
    low: Tensor,
) -> Tensor:
    out, inputs = x.new_empty(1, outputs), x.shape[1]
    most, soon = pairs.b.shape[2], early()
    width, cut = pairs.parts * most, _cut_of(inputs)
    adapter = own.tiles, pairs.ranks
    first = (x, pairs.a, low, *adapter, width, most, inputs, *cut, soon)
    launch(_shrink_row, (width,), *first, num_warps=4)
    given = out if bias is None else bias
    of_pairs = pairs.b, pairs.scales, pairs.ends
    columns = power_of_2(most)
    shape = inputs, pairs.parts, most, columns, *cut, bias is not None, soon
    second = (x, weight, given, out, low, *of_pairs, *adapter, outputs, *shape)
    launch(kernel, (outputs,), *second, num_warps=4, launch_pdl=soon)
    return out


def _cut_of(inputs: int) -> tuple[int, int]:
    """Inputs whose weights are asked for first, and of each step behind them."""
    block = block_of(inputs)
    most = min(_AHEAD, 1 << (inputs.bit_length() - 1))
    return max(block, most if inputs % block == 0 else block), block
