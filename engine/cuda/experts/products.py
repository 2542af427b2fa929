"""Products of rows with the weights of their experts. Only chosen experts are read.

1. A program takes a tile of an expert's output channels, and all rows of that expert, some at a
   time. So a tile of weights comes from memory once, and from the cache after that.
2. Weights are the left operand of the tensor cores, rows the right one: few rows waste little.
3. FP8 values are multiplied as they are, and sums of a step are added in float32, as in
   `engine.cuda.products.few_rows`. INT4 and MXFP4 have a kernel of their own
   (`engine.cuda.experts.four_bits`).
4. One row has kernels of its own (`engine.cuda.experts.one_row`, and `four_bits_row` beside it).
5. A sum has one program, which adds in the order of the inputs. So it is the same in every run.

Where fewer pairs than experts come, a program belongs to a pair, and runs if its pair is the first
of its expert. Otherwise a program belongs to an expert. So the grid follows from the number of rows
alone, and graphs can be captured.

Shapes: R rows, P pairs, E experts that the rank holds, N output channels and K input channels of an
expert.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from functools import partial
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from engine.attention.parts import PROCESSORS
from engine.cuda.experts import four_bits, four_bits_row, one_row
from engine.cuda.experts.beside import Alike
from engine.cuda.experts.cutting import Tiles, expert_of, whose, with_bias
from engine.cuda.experts.routing import Order, form_of, gated, numbers
from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.model.experts.config import Gate
from engine.model.experts.stacked import Stacked
from engine.model.precision.base import Kind
from engine.model.precision.rounding import Rounded

_PLAIN: Final = tl.constexpr(0)
_CHANNELS: Final = tl.constexpr(1)
_BLOCKS: Final = tl.constexpr(2)
_KINDS: Final = {None: 0, Kind.FP8_CHANNELS: 1, Kind.FP8_BLOCKS: 2}
_FOUR_BITS: Final = (Kind.INT4, Kind.MXFP4)
_BLOCK: Final = tl.constexpr(128)


def tiles_of(weights: Stacked, tokens: int, pairs: int) -> Tiles:
    """By shapes alone. Measured with Qwen3-30B-A3B on an H200 (`bench/history/experts.md`), in
    bf16 and FP8: of 18 ways to cut a product none is more than a twentieth faster, for 64 and 256
    tokens. Rows are for one and a half times the mean: experts with more read their weights
    twice."""
    experts, outputs, _ = weights.shape
    each = pairs / min(pairs, experts)
    if tokens == 1 and four_bits_row.takes(weights):
        return four_bits_row.tiles_of(weights)
    if weights.kind in _FOUR_BITS:
        return four_bits.tiles_of(each)
    if tokens == 1:
        return one_row.tiles_of(weights)
    rows = min(64, max(16, power_of_2(int(1.5 * each))))
    few = min(pairs, experts) * pieces_of(outputs, 64) < 2 * PROCESSORS
    return Tiles(64, 128, rows, stages=5 if few and tokens <= 16 else 3)


@triton.jit
def _block_scales(scales, x_scales, row, x_row, first, inside, seen, blocks, x_step):
    """The scales of a step of 128 inputs, [bn, bm]. `x_step`: from one group of a row to the next;
    rows are neighbours."""
    number = first // _BLOCK
    own = tl.load(scales + (row // _BLOCK) * blocks + number, mask=inside, other=0.0)
    theirs = tl.load(x_scales + x_row + number * x_step, mask=seen, other=0.0)
    return own[:, None] * theirs[None, :]


@triton.jit
def _sums(
    values, scales, x, x_scales, row, position, inputs, x_step, inside, seen,
    kind: tl.constexpr, bn: tl.constexpr, bm: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    """Products of weight rows with input rows, [bn, bm], all scales in them."""
    acc = tl.zeros((bn, bm), tl.float32)
    x_row = position * inputs
    for first in range(0, inputs, bk):
        at = first + tl.arange(0, bk)
        there = at < inputs
        own = tl.load(
            values + row[:, None] * inputs + at[None, :],
            mask=inside[:, None] & there[None, :],
            other=0.0,
        )
        theirs = tl.load(
            x + x_row[None, :] + at[:, None], mask=there[:, None] & seen[None, :], other=0.0
        )
        part = tl.dot(own, theirs, input_precision="ieee")
        if kind == _BLOCKS:
            part *= _block_scales(
                scales, x_scales, row, position, first, inside, seen, inputs // _BLOCK, x_step
            )
        acc += part
    if kind == _CHANNELS:
        acc *= tl.load(scales + row, mask=inside, other=0.0)[:, None]
        acc *= tl.load(x_scales + position, mask=seen, other=0.0)[None, :]
    return acc


@triton.jit(do_not_specialize=["x_step"])
def _product(
    values, scales, bias, x, x_scales, out, pairs, starts, experts, count,
    width, inputs, x_step, sharpness, shift, limit,
    programs: tl.constexpr, places: tl.constexpr, gate: tl.constexpr, form: tl.constexpr,
    has_bias: tl.constexpr, kind: tl.constexpr,
    bn: tl.constexpr, bm: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    """`width`: columns of `out`. With `gate`, a weight has twice as many rows. `places`: pairs of a
    token, where `x` has a row for each token; 0: `x` has a row for each pair, in order."""
    expert, begin, end = expert_of(pairs, starts, experts, count, programs)
    channel = tl.program_id(1) * bn + tl.arange(0, bn)
    inside = channel < width
    factor: tl.constexpr = 2 if gate else 1
    row = expert.to(tl.int64) * width * factor + channel
    dtype: tl.constexpr = out.dtype.element_ty
    for first in range(begin, end, bm):
        place = first + tl.arange(0, bm)
        seen = place < end
        position = place.to(tl.int64)
        if places > 0:
            position = (tl.load(pairs + place, mask=seen, other=0) // places).to(tl.int64)
        acc = _sums(
            values, scales, x, x_scales, row, position, inputs, x_step, inside, seen,
            kind, bn, bm, bk,
        )  # fmt: skip
        acc = with_bias(acc, bias, row, inside, has_bias)
        if gate:
            up = _sums(
                values, scales, x, x_scales, row + width, position, inputs, x_step, inside, seen,
                kind, bn, bm, bk,
            )  # fmt: skip
            up = with_bias(up, bias, row + width, inside, has_bias)
            acc = gated(acc, up, dtype, sharpness, shift, limit, form)
        target = out + place[None, :].to(tl.int64) * width + channel[:, None]
        tl.store(target, acc, mask=inside[:, None] & seen[None, :])


def product(
    x: Tensor | Rounded,
    weights: Stacked,
    order: Order,
    *,
    gate: Gate | None = None,
    by_token: bool = False,
    tiles: Tiles | None = None,
    shared: Alike | None = None,
) -> Tensor:
    """Products of pairs.

    Args:
        x: in the form of `weights.input`, but where `tiles` have one row in the model's dtype;
            [P, K] in the order of the pairs.
        weights: of all experts.
        order: of the pairs.
        gate: what is done with gate and up, which are the halves of the weights' rows.
        by_token: `x` is [T, K], a row for each token.
        tiles: how it is cut; None: `tiles_of`. One row: by the kernel for one row.
        shared: of one row, not in four bits: the weight of one more expert behind the pairs.

    Returns:
        [P, N], or [P, N / 2] with a gate, in the order of the pairs, in the model's dtype.
    """
    (tokens, places), (experts, outputs, inputs) = order.experts.shape, weights.shape
    pairs = tokens * places
    rows, x_scales = x[:2] if isinstance(x, Rounded) else (x, x)
    width = outputs // 2 if gate else outputs
    out = rows.new_empty(pairs + (shared is not None), width, dtype=weights.dtype)
    cut = tiles or tiles_of(weights, tokens, pieces_of(pairs, order.ranks))
    if cut.rows == 1:
        is_small = weights.kind in _FOUR_BITS
        own = four_bits_row.product if is_small else partial(one_row.product, shared=shared)
        own(rows, weights, order.experts, out, by_token, gate, cut)
        return out
    if weights.kind in _FOUR_BITS:
        four_bits.product(rows, weights, order, out, places if by_token else 0, gate, cut)
        return out
    unused = order.starts
    launch(
        _product,
        (min(pairs, experts), pieces_of(width, cut.outputs)),
        weights.values,
        _or(weights.scales, unused),
        _or(weights.bias, unused),
        rows,
        x_scales,
        out,
        order.pairs,
        order.starts,
        order.experts,
        experts,
        width,
        inputs,
        x_scales.stride(1) if weights.kind is Kind.FP8_BLOCKS else 0,
        *numbers(gate or Gate())[:3],
        whose(tokens, pairs, experts),
        places if by_token else 0,
        gate is not None,
        form_of(gate),
        weights.bias is not None,
        _KINDS[weights.kind],
        cut.outputs,
        cut.rows,
        _inputs(weights, cut),
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return out


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel takes no None."""
    return other if tensor is None else tensor


def _inputs(weights: Stacked, cut: Tiles) -> int:
    """A step of FP8 in blocks is a block."""
    return _BLOCK.value if weights.kind is Kind.FP8_BLOCKS else cut.inputs
