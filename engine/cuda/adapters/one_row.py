"""What adapters add to the product of one row, which memory alone limits.

A small kernel computes what the pair's first half gives. It starts when all before have ended, and
lets the product start at once: that reads the row and its weights meanwhile, and waits for the
small kernel only before it writes. So what is added costs no pass over the outputs of its own.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.adapters.kernels import Pairs, Tiles
from engine.cuda.early import early
from engine.cuda.kernels import launch
from engine.cuda.products.single_row import block_of, part_of


@triton.jit
def _adapter(tiles, ranks):
    """Slot and rank of the row; rank 0: there is nothing to add."""
    slot = tl.load(tiles)
    rank = tl.load(ranks + tl.maximum(slot, 0))
    return tl.maximum(slot, 0).to(tl.int64), tl.where(slot >= 0, rank, 0)


@triton.jit
def _product(x, weight, inputs: tl.constexpr, block: tl.constexpr):
    """The row by a row of a weight."""
    acc = tl.zeros((block,), tl.float32)
    for start in range(0, inputs, block):
        acc += part_of(x, start, inputs, block) * part_of(weight, start, inputs, block)
    return tl.sum(acc)


@triton.jit
def _shrink_row(
    x, a, low, tiles, ranks, width: tl.constexpr, most: tl.constexpr, inputs: tl.constexpr,
    block: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
    column = tl.program_id(0)
    slot, rank = _adapter(tiles, ranks)
    if column % most < rank:
        own = a + (slot * width + column) * inputs
        tl.store(low + column, _product(x, own, inputs, block))


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
    block: tl.constexpr, has_bias: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
    output = tl.program_id(0).to(tl.int64)
    slot, rank = _adapter(tiles, ranks)
    own, scale, part = _of_pair(
        b, scales, ends, slot, rank, output, outputs, parts, most, columns
    )  # fmt: skip
    total = _product(x, weight + output * inputs, inputs, block)
    if has_bias:
        total += tl.load(bias + output).to(tl.float32)
    if pdl:
        gdc_wait()
    tl.store(out + output, _with_added(total, low, own, scale, part, rank, most, columns))


@triton.jit
def _gated_dot(
    x, weight, bias, out, low, b, scales, ends, tiles, ranks, size,
    inputs: tl.constexpr, parts: tl.constexpr, most: tl.constexpr, columns: tl.constexpr,
    block: tl.constexpr, has_bias: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up; `size`: outputs of each."""
    if pdl:
        gdc_launch_dependents()
    output = tl.program_id(0).to(tl.int64)
    slot, rank = _adapter(tiles, ranks)
    of_gate, gate_scale, gate_part = _of_pair(
        b, scales, ends, slot, rank, output, 2 * size, parts, most, columns
    )  # fmt: skip
    of_up, up_scale, up_part = _of_pair(
        b, scales, ends, slot, rank, output + size, 2 * size, parts, most, columns
    )  # fmt: skip
    gate_row, up_row = weight + output * inputs, weight + (output + size) * inputs
    gates, ups = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
    for start in range(0, inputs, block):
        value = part_of(x, start, inputs, block)
        gates += value * part_of(gate_row, start, inputs, block)
        ups += value * part_of(up_row, start, inputs, block)
    gate, up = tl.sum(gates), tl.sum(ups)
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
    most, block, soon = pairs.b.shape[2], block_of(inputs), early()
    width = pairs.parts * most
    adapter = own.tiles, pairs.ranks
    first = (x, pairs.a, low, *adapter, width, most, inputs, block, soon)
    launch(_shrink_row, (width,), *first, num_warps=4)
    given = out if bias is None else bias
    of_pairs = pairs.b, pairs.scales, pairs.ends
    columns = triton.next_power_of_2(most)
    shape = inputs, pairs.parts, most, columns, block, bias is not None, soon
    second = (x, weight, given, out, low, *of_pairs, *adapter, outputs, *shape)
    launch(kernel, (outputs,), *second, num_warps=4, launch_pdl=soon)
    return out
