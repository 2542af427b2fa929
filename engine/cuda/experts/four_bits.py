"""Products of rows with the weights of their experts in INT4 and MXFP4. One row has a kernel of its
own where that takes the weights (`engine.cuda.experts.four_bits_row`).

They are cut as in `engine.cuda.experts.products`. A byte holds two inputs, and to make numbers of
them must not take longer than to read them:

1. PTX makes eight numbers of four bytes, two in a register. Triton would make each apart.
2. Even and odd inputs are multiplied apart, since a byte has one of each. Rows are read as words of
   two inputs, which lie as the bytes do. So nothing is gathered.
3. A scale is loaded once for its group. Scales of a row are too few bytes to be copied ahead as
   values are. So a step asks for those of the next one before it multiplies.
4. Gate and up go through the inputs together, with the same rows.

Shapes: P pairs, E experts, N output channels and K input channels of an expert.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.experts.cutting import Tiles, expert_of, whose, with_bias
from engine.cuda.experts.routing import Order, form_of, gated, numbers
from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.model.experts.config import Gate
from engine.model.experts.stacked import Stacked
from engine.model.precision.base import Kind

_WORDS: Final = {2: torch.int32, 4: torch.int64}
"""Words of two inputs, by the bytes of one."""
_MANY_ROWS: Final = 32
"""At a time, from which on a program takes more outputs."""


def tiles_of(rows: float) -> Tiles:
    """How it is cut for so many rows of an expert. By counts of instructions, not measured."""
    at_once = min(64, max(8, power_of_2(int(1.5 * rows))))
    return Tiles(64, 64, at_once, 4, 4) if at_once >= _MANY_ROWS else Tiles(32, 64, at_once, 2, 5)


# -- numbers ------------------------------------------------------------------------------------


def _asm(low: str, high: str, constants: str = "") -> str:
    """PTX that makes numbers of the four bytes in $4: $0 and $1 of their lower bits, $2 and $3 of
    the others. `in` has two bytes, each of them in both bytes of 16 bits."""
    text = "{ .reg .b32 in, s, m, f, z; " + constants
    for two, outs in (("0x1100", ("$0", "$2")), ("0x3322", ("$1", "$3"))):
        text += f"prmt.b32 in, $4, 0, {two}; "
        text += low.replace("OUT", outs[0]) + high.replace("OUT", outs[1])
    return text + "}"


def _e2m1(kind: str, shift: int, factor: int) -> str:
    """A number has the sign, and then the lower three bits where exponent and fraction meet: they
    are `shift` from the right. What is wrong then is the exponent's bias alone, which a
    multiplication by a power of two (`factor`, as bits) puts right, exactly, for 0.5, too."""
    merge = (
        f"and.b32 s, s, 0x80008000; and.b32 m, m, {_twice(7 << shift)}; or.b32 s, s, m; "
        f"fma.rn.{kind} OUT, s, f, z; "
    )
    return _asm(
        f"shl.b32 s, in, 4; shl.b32 m, in, {shift}; " + merge,
        f"mov.b32 s, in; shl.b32 m, in, {shift - 4}; " + merge,
        f"mov.b32 f, {_twice(factor)}; mov.b32 z, 0x80008000; ",
    )


def _int4(offset: int) -> str:
    """`offset`: the bits of a number whose lowest four bits count ones. It is in the sums."""
    merge = f"and.b32 s, s, 0x000f000f; or.b32 OUT, s, {_twice(offset)}; "
    return _asm("mov.b32 s, in; " + merge, "shr.b32 s, in, 4; " + merge)


def _twice(bits: int) -> str:
    return f"0x{bits * 0x10001:08x}"


_E2M1_BF16: Final = tl.constexpr(_e2m1("bf16x2", 6, 0x7E80))
_E2M1_FP16: Final = tl.constexpr(_e2m1("f16x2", 9, 0x7400))
_INT4_BF16: Final = tl.constexpr(_int4(0x4300))
_INT4_FP16: Final = tl.constexpr(_int4(0x6400))
_REGISTERS: Final = tl.constexpr("=r,=r,=r,=r,r")


@triton.jit
def numbers_of(pairs, mxfp4: tl.constexpr, bf16: tl.constexpr):
    """The numbers of the lower and of the upper four bits of bytes, in bfloat16 or float16. INT4
    has 128 added in bfloat16, and 1024 in float16."""
    if bf16:
        return tl.inline_asm_elementwise(
            _E2M1_BF16 if mxfp4 else _INT4_BF16, _REGISTERS, [pairs],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:  # noqa: RET505 (Triton knows then that one of both is compiled)
        return tl.inline_asm_elementwise(
            _E2M1_FP16 if mxfp4 else _INT4_FP16, _REGISTERS, [pairs],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip


@triton.jit
def _from_bits(value, dtype: tl.constexpr):
    """The number whose bits are the lowest of an integer."""
    bits: tl.constexpr = tl.uint16 if dtype.primitive_bitwidth == 16 else tl.uint32
    return value.to(bits).to(dtype, bitcast=True)


@triton.jit
def _power(exponent, dtype: tl.constexpr):
    """Two to an exponent whose bias is 127. Of 2 ** -127 it makes 0."""
    if dtype == tl.bfloat16:
        return _from_bits(exponent.to(tl.uint16) << 7, dtype)
    else:  # noqa: RET505
        return _from_bits(exponent.to(tl.uint32) << 23, tl.float32).to(dtype)


# -- products -----------------------------------------------------------------------------------


@triton.jit
def _of_groups(values, row, first, size, inside, group: tl.constexpr, spread: tl.constexpr,
               bk: tl.constexpr):  # fmt: skip
    """What a step's groups have one of, [bn, bk / spread]."""
    at = first + tl.arange(0, bk // spread) * spread
    place = row[:, None] * (size // group) + (at // group)[None, :]
    return tl.load(values + place, mask=inside[:, None] & (at < size)[None, :], other=0)


@triton.jit
def _spread_out(value, bk: tl.constexpr):
    """[bn, bk / spread] -> [bn, bk]"""
    bn: tl.constexpr = value.shape[0]
    slots: tl.constexpr = value.shape[1]
    wide = tl.broadcast_to(value[:, :, None], (bn, slots, bk // slots))
    return tl.reshape(wide, (bn, bk))


@triton.jit
def _weights(
    values, row, at, size, scale, zero, inside,
    dtype: tl.constexpr, mxfp4: tl.constexpr, has_zeros: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    """Even and odd inputs of a step, [bn, bk] each."""
    mask = inside[:, None] & (at < size)[None, :]
    pairs = tl.load(values + row[:, None] * size + at[None, :], mask=mask, other=0)
    low, high = numbers_of(pairs, mxfp4, dtype == tl.bfloat16)
    low, high = low.to(dtype), high.to(dtype)
    if mxfp4:
        factor = _power(scale, dtype)
    else:
        factor = scale.to(dtype)
        offset: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
        if has_zeros:
            middle = _spread_out((zero.to(tl.float32) + offset).to(dtype), bk)
        else:
            middle = tl.full((), offset + 8.0, dtype)
        low, high = low - middle, high - middle
    factor = _spread_out(factor, bk)
    return low * factor, high * factor


@triton.jit
def _sums(
    values, scales, zeros, x, row, up_row, position, size, inside, seen,
    dtype: tl.constexpr, gate: tl.constexpr, mxfp4: tl.constexpr, has_zeros: tl.constexpr,
    group: tl.constexpr, spread: tl.constexpr,
    bn: tl.constexpr, bm: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    """Products of weight rows with input rows, [bn, bm]: of `row`, and with `gate` of `up_row`."""
    acc, up = tl.zeros((bn, bm), tl.float32), tl.zeros((bn, bm), tl.float32)
    scale = _of_groups(scales, row, 0, size, inside, group, spread, bk)
    zero, up_scale, up_zero = scale, scale, scale
    if has_zeros:
        zero = _of_groups(zeros, row, 0, size, inside, group, spread, bk)
        up_zero = zero
    if gate:
        up_scale = _of_groups(scales, up_row, 0, size, inside, group, spread, bk)
        if has_zeros:
            up_zero = _of_groups(zeros, up_row, 0, size, inside, group, spread, bk)
    for first in range(0, size, bk):
        at, after = first + tl.arange(0, bk), first + bk
        own, own_zero, own_up, own_up_zero = scale, zero, up_scale, up_zero
        scale = _of_groups(scales, row, after, size, inside, group, spread, bk)
        if has_zeros:
            zero = _of_groups(zeros, row, after, size, inside, group, spread, bk)
        if gate:
            up_scale = _of_groups(scales, up_row, after, size, inside, group, spread, bk)
            if has_zeros:
                up_zero = _of_groups(zeros, up_row, after, size, inside, group, spread, bk)
        mask = (at < size)[:, None] & seen[None, :]
        word = tl.load(x + position[None, :] * size + at[:, None], mask=mask, other=0)
        even = _from_bits(word, dtype)
        odd = _from_bits(word >> dtype.primitive_bitwidth, dtype)
        low, high = _weights(
            values, row, at, size, own, own_zero, inside, dtype, mxfp4, has_zeros, bk
        )
        acc = tl.dot(low, even, acc, input_precision="ieee")
        acc = tl.dot(high, odd, acc, input_precision="ieee")
        if gate:
            low, high = _weights(
                values, up_row, at, size, own_up, own_up_zero, inside, dtype, mxfp4, has_zeros, bk
            )
            up = tl.dot(low, even, up, input_precision="ieee")
            up = tl.dot(high, odd, up, input_precision="ieee")
    return acc, up


@triton.jit
def _product(
    values, scales, zeros, bias, x, out, pairs, starts, experts, count,
    width, size, sharpness, shift, limit,
    programs: tl.constexpr, places: tl.constexpr, gate: tl.constexpr, form: tl.constexpr,
    has_bias: tl.constexpr, mxfp4: tl.constexpr, has_zeros: tl.constexpr,
    group: tl.constexpr, spread: tl.constexpr,
    bn: tl.constexpr, bm: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    """As that of `engine.cuda.experts.products`. `size` and `group`: bytes of a row and of a group.
    `spread`: bytes that a step is sure to have of a group."""
    expert, begin, end = expert_of(pairs, starts, experts, count, programs)
    dtype: tl.constexpr = out.dtype.element_ty
    channel = tl.program_id(1) * bn + tl.arange(0, bn)
    inside = channel < width
    factor: tl.constexpr = 2 if gate else 1
    row = expert.to(tl.int64) * width * factor + channel
    for first in range(begin, end, bm):
        place = first + tl.arange(0, bm)
        seen = place < end
        position = place.to(tl.int64)
        if places > 0:
            position = (tl.load(pairs + place, mask=seen, other=0) // places).to(tl.int64)
        acc, up = _sums(
            values, scales, zeros, x, row, row + width, position, size, inside, seen,
            dtype, gate, mxfp4, has_zeros, group, spread, bn, bm, bk,
        )  # fmt: skip
        acc = with_bias(acc, bias, row, inside, has_bias)
        if gate:
            up = with_bias(up, bias, row + width, inside, has_bias)
            acc = gated(acc, up, dtype, sharpness, shift, limit, form)
        target = out + place[None, :].to(tl.int64) * width + channel[:, None]
        tl.store(target, acc, mask=inside[:, None] & seen[None, :])


def product(
    x: Tensor,
    weights: Stacked,
    order: Order,
    out: Tensor,
    places: int,
    gate: Gate | None,
    cut: Tiles,
) -> None:
    """Fills in `out`, [P, N] or [P, N / 2]. See `engine.cuda.experts.products.product`.

    Args:
        x: contiguous.
        weights: in INT4 or MXFP4.
        order: of the pairs.
        out: in the order of the pairs.
        places: pairs of a token, where `x` has a row for each token; else 0.
        gate: what is done with gate and up.
        cut: how it is cut.
    """
    size, group = weights.inputs // 2, weights.group // 2
    spread = cut.inputs if group == size else math.gcd(group, cut.inputs)
    points, unused = weights.zero_points, order.starts
    launch(
        _product,
        (min(len(out), weights.shape[0]), pieces_of(out.shape[1], cut.outputs)),
        weights.values,
        weights.scales,
        unused if points is None else points,
        unused if weights.bias is None else weights.bias,
        x.view(_WORDS[x.element_size()]),
        out,
        order.pairs,
        order.starts,
        order.experts,
        weights.shape[0],
        out.shape[1],
        size,
        *numbers(gate or Gate())[:3],
        whose(len(order.experts), len(out), weights.shape[0]),
        places,
        gate is not None,
        form_of(gate),
        weights.bias is not None,
        weights.kind is Kind.MXFP4,
        points is not None,
        group,
        spread,
        cut.outputs,
        cut.rows,
        cut.inputs,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
