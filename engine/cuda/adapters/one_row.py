"""What adapters add to the product of one row: its first step is a part of the product's launch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from engine.cuda.adapters.kernels import Low, Pairs, Tiles
from engine.cuda.early import early
from engine.cuda.kernels import launch
from engine.cuda.products.single_row import block_of, part_of


@triton.jit
def _dot_and_shrink(
    x, weight, bias, out, a, low, tiles, ranks, outputs,
    inputs: tl.constexpr, parts: tl.constexpr, most: tl.constexpr, columns: tl.constexpr,
    block: tl.constexpr, has_bias: tl.constexpr, pdl: tl.constexpr,
):  # fmt: skip
    """`shrink` of one row, as further outputs of the product (`engine.cuda.products.single_row`).
    It is launched when all before have ended."""
    if pdl:
        gdc_launch_dependents()
    program = tl.program_id(0)
    beyond = program - outputs
    slot = tl.load(tiles)
    rank = tl.load(ranks + tl.maximum(slot, 0))
    wanted = tl.where(slot >= 0, tl.cdiv(rank, columns) * columns, 0)  # Whole steps are read.
    if (beyond < 0) | (beyond % most < wanted):
        own = weight + program.to(tl.int64) * inputs
        if beyond >= 0:
            own = a + (slot.to(tl.int64) * parts * most + beyond) * inputs
        acc = tl.zeros((block,), tl.float32)
        for start in range(0, inputs, block):
            acc += part_of(x, start, inputs, block) * part_of(own, start, inputs, block)
        total = tl.sum(acc)
        if beyond >= 0:
            tl.store(low + beyond, total)
        else:
            if has_bias:
                total += tl.load(bias + program).to(tl.float32)
            tl.store(out + program, total)


def dot_and_shrink(
    x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs, own: Tiles, values: Tensor
) -> tuple[Tensor, Low]:
    """The product of one row, and its first step. `weight` has the dtype of the pairs."""
    out, most = x.new_empty(1, len(weight)), pairs.b.shape[2]
    launch(
        _dot_and_shrink,
        (len(weight) + pairs.parts * most,),
        x,
        weight,
        out if bias is None else bias,
        out,
        pairs.a,
        values,
        own.tiles,
        pairs.ranks,
        len(weight),
        x.shape[1],
        pairs.parts,
        most,
        pairs.columns,
        block_of(x.shape[1]),
        bias is not None,
        early(),
        num_warps=4,
    )
    return out, Low(values, 1, pairs.parts * most)
