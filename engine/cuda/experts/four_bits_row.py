"""Products of one row with the weights of its experts in INT4 and MXFP4.

As in `engine.cuda.experts.one_row`, nothing is sorted, and a program belongs to a pair and to some
output channels. To make float32 of numbers of four bits takes more instructions than there is time
for while they are read. So products are of integers:

1. While weights come, the row is written as integers of 16 bits, with a power of two for each
   *unit* of 32 inputs. It keeps each element to 2 ** -15 of the largest of its unit. Of float32,
   what is left is written in the same way, and multiplied as well.
2. Two byte permutations make four signed bytes of four MXFP4 numbers. INT4 numbers become unsigned
   bytes.
3. `dp2a` multiplies two of each, and adds. The sum of a unit is exact.
4. It becomes float32, times the scales of the row's unit and the weight's. Such sums are added in
   float32.

Shapes: C experts of the row, N output channels and K input channels of an expert, U = K / 32 units.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.experts.cutting import Tiles, with_bias
from engine.cuda.experts.routing import form_of, gated, numbers
from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.model.experts.config import Gate
from engine.model.experts.stacked import Stacked
from engine.model.precision.base import Kind

UNIT: Final = 32
"""Inputs. Their weights are 16 bytes, which a thread reads at once."""
_UNIT: Final = tl.constexpr(UNIT)
_WORDS: Final = tl.constexpr(UNIT // 8)
"""Words of a unit, of four bytes each."""
_BYTES: Final = 512
"""Bytes of a channel in a step: 16 for each thread of a warp."""
_MAGIC: Final = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23. In the sum of it and a smaller number, the lowest bits are an integer."""
_LEAST_EXPONENT: Final = tl.constexpr(64)
"""Least exponent of a unit, with its bias. What is smaller counts as so large, so no scale is
subnormal."""


def takes(weights: Stacked) -> bool:
    """Whether units cut these weights evenly."""
    four_bits = weights.kind in (Kind.INT4, Kind.MXFP4)
    return four_bits and weights.inputs % UNIT == 0 and weights.group % UNIT == 0


def tiles_of(weights: Stacked) -> Tiles:
    """By shapes alone. Measured with gpt-oss-20b on an H200 (`bench/history/experts.md`). A
    program is a warp, and many fit a processor. So while some wait for weights, others multiply."""
    units = min(_BYTES * 2, power_of_2(weights.inputs)) // UNIT
    return Tiles(8, units * UNIT // 2, 1, 1, 1)


# -- products of integers -----------------------------------------------------------------------


def _dots(numbers: str) -> str:
    """PTX that adds to $1 the products of the four words $2 to $5 with the sixteen pairs $6 to $21.
    `numbers` makes eight bytes of a word, in `e` and `o`. Its tables may be in $22 and $23."""
    text = "{ .reg .b32 e, o, s, n, m; mov.b32 $0, $1; "
    for word in range(4):
        text += numbers.replace("WORD", f"${2 + word}")
        for place, (half, four) in enumerate((("lo", "e"), ("hi", "e"), ("lo", "o"), ("hi", "o"))):
            text += f"dp2a.{half}.s32.BYTES $0, ${6 + 4 * word + place}, {four}, $0; "
    return text + "}"


_MXFP4: Final = tl.constexpr(
    _dots(
        "xor.b32 n, WORD, 0x88888888; shr.b32 s, WORD, 16; shr.b32 m, n, 16; "
        "prmt.b32 e, $22, 0xccc8c6c4, WORD; prmt.b32 n, $23, 0xb4b8babc, n; "
        "and.b32 e, e, n; "
        "prmt.b32 o, $22, 0xccc8c6c4, s; prmt.b32 m, $23, 0xb4b8babc, m; "
        "and.b32 o, o, m; "
    ).replace("BYTES", "s32")
)
"""Bytes are twice the numbers, less 64: the first eight that a permutation chooses from are of
positive numbers, the next eight of negative ones. Where a number has the other sign, the bit of the
sign makes the permutation repeat the highest bit of a byte, which is set in all of them. So each
number is all ones in one of both permutations."""
_INT4: Final = tl.constexpr(
    _dots("and.b32 e, WORD, 0x0f0f0f0f; shr.b32 o, WORD, 4; and.b32 o, o, 0x0f0f0f0f; ").replace(
        "BYTES", "u32"
    )
)
_POSITIVE: Final = tl.constexpr(0xC3C2C1C0 - (1 << 32))
_NEGATIVE: Final = tl.constexpr(0xBDBEBFC0 - (1 << 32))
"""The first four bytes of both tables."""
_REGISTERS: Final = tl.constexpr("=&r" + ",r" * 23)

_TOTAL: Final = tl.constexpr(
    "mov.b32 $0, 0; "
    + "".join(f"dp2a.lo.s32.s32 $0, ${1 + pair}, 0x0101, $0; " for pair in range(16))
)
_PAIRS: Final = tl.constexpr("=&r" + ",r" * 16)


@triton.jit
def _four(value):
    """[.., 4] -> four of [..]."""
    units: tl.constexpr = value.shape[0]
    rows: tl.constexpr = value.shape[1]
    even, odd = tl.split(tl.reshape(value, (units, rows, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _dot(words, pairs, start, zero, mxfp4: tl.constexpr):
    """`start` and the products of weights [bu, bn, 4] with a row's units, [bu, bn] int32. `zero`
    is 0 in each thread, which the compiler does not know: tables of known numbers it would load
    again and again."""
    w0, w1, w2, w3 = _four(words)
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = pairs  # noqa: E741
    return tl.inline_asm_elementwise(
        _MXFP4 if mxfp4 else _INT4, _REGISTERS,
        [start, w0, w1, w2, w3, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p,
         zero + _POSITIVE, zero + _NEGATIVE],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _total(pairs):
    """The sum of a row's units, [bu, 1] int32."""
    a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = pairs  # noqa: E741
    return tl.inline_asm_elementwise(
        _TOTAL, _PAIRS, [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


# -- the row ------------------------------------------------------------------------------------


@triton.jit
def _eight(x, unit, number: tl.constexpr, units: tl.constexpr):
    """Elements of each unit that meet one word of a weight, [bu, 1, 8] float32."""
    at = (unit * _UNIT + number * 8)[:, None, None] + tl.arange(0, 8)[None, None, :]
    return tl.load(x + at, mask=(unit < units)[:, None, None], other=0.0).to(tl.float32)


@triton.jit
def _units(x, unit, units: tl.constexpr):
    """Units of a row, by the words that they meet."""
    a, b = _eight(x, unit, 0, units), _eight(x, unit, 1, units)
    return a, b, _eight(x, unit, 2, units), _eight(x, unit, 3, units)


@triton.jit
def _size(eight):
    """The bits of the largest magnitude. What is no number is the largest."""
    return tl.max(eight.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)


@triton.jit
def _scale(eights, top: tl.constexpr):
    """Scale of integers up to 2 ** (top + 1), [bu, 1], and the inverse of it. A unit with an
    element that is no number or infinite has a scale that is no number."""
    a, b, c, d = eights
    size = tl.maximum(tl.maximum(_size(a), _size(b)), tl.maximum(_size(c), _size(d)))
    exponent = size >> 23
    is_number = exponent < 255
    exponent = tl.maximum(exponent, _LEAST_EXPONENT)
    scale = ((exponent - top) << 23).to(tl.float32, bitcast=True)
    inverse = ((254 + top - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_number, scale, float("nan")), inverse


@triton.jit
def _integers(eight, scale, inverse, mxfp4: tl.constexpr):
    """Four pairs of integers, [bu, 1] each, in the order of the bytes that a word becomes; and what
    is left."""
    units: tl.constexpr = eight.shape[0]
    shifted = eight * inverse[:, :, None] + _MAGIC
    left = eight - (shifted - _MAGIC) * scale[:, :, None]
    integers = shifted.to(tl.int32, bitcast=True)
    if mxfp4:
        both = tl.reshape(integers, (units, 1, 4, 2))
    else:
        both = tl.permute(tl.reshape(integers, (units, 1, 2, 2, 2)), (0, 1, 4, 2, 3))
        both = tl.reshape(both, (units, 1, 4, 2))
    low, high = tl.split(both)
    return _four((low & 0xFFFF) | (high << 16)), left


@triton.jit
def _rounded(eights, top: tl.constexpr, mxfp4: tl.constexpr):
    """Units of a row as sixteen pairs, sums and scales, [bu, 1] each; and what is left."""
    a, b, c, d = eights
    scale, inverse = _scale(eights, top)
    a, a_left = _integers(a, scale, inverse, mxfp4)
    b, b_left = _integers(b, scale, inverse, mxfp4)
    c, c_left = _integers(c, scale, inverse, mxfp4)
    d, d_left = _integers(d, scale, inverse, mxfp4)
    pairs = a + b + c + d
    return pairs, _total(pairs), scale, (a_left, b_left, c_left, d_left)


# -- products -----------------------------------------------------------------------------------


@triton.jit
def _words(values, row, channel, unit, inside, units: tl.constexpr):
    """Weights [bu, bn, 4]. `row`: the first one. Others are at distances that are known when this
    is compiled."""
    at = (channel * (units * _WORDS))[None, :] + (unit * _WORDS)[:, None]
    at = at[:, :, None] + tl.arange(0, _WORDS)[None, None, :]
    mask = (unit < units)[:, None, None] & inside[None, :, None]
    return tl.load(values + row * (units * _WORDS) + at, mask=mask, other=0)


@triton.jit
def _groups(
    scales, zeros, row, channel, unit, inside,
    units: tl.constexpr, spread: tl.constexpr, has_zeros: tl.constexpr,
):  # fmt: skip
    """Scales and zero points of the weights' groups [bu, bn]."""
    groups: tl.constexpr = units // spread
    at = (channel * groups)[None, :] + (unit // spread)[:, None]
    at = tl.max_contiguous(at, (1, 1))  # So threads have the scales of their own units.
    mask = (unit < units)[:, None] & inside[None, :]
    scale = tl.load(scales + row * groups + at, mask=mask, other=0)
    middle = scale
    if has_zeros:
        middle = tl.load(zeros + row * groups + at, mask=mask, other=0)
    return scale, middle


@triton.jit
def _part(
    words, groups, pairs, total, row_scale, zero, mxfp4: tl.constexpr, has_zeros: tl.constexpr
):
    """What units add to sums, [bu, bn] float32."""
    scale, middle = groups
    if mxfp4:
        start = tl.broadcast_to(total * 64, scale.shape)
        factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        row_scale = row_scale * 0.5
    else:
        points = middle.to(tl.int32) if has_zeros else tl.full(scale.shape, 8, tl.int32)
        start = -points * total
        factor = scale.to(tl.float32)
    return _dot(words, pairs, start, zero, mxfp4).to(tl.float32) * row_scale * factor


@triton.jit
def _four_bits_row(
    values, scales, zeros, bias, x, out, experts, count, width, sharpness, shift, limit,
    units: tl.constexpr, spread: tl.constexpr, by_token: tl.constexpr, gate: tl.constexpr,
    form: tl.constexpr, has_bias: tl.constexpr, mxfp4: tl.constexpr, has_zeros: tl.constexpr,
    even: tl.constexpr, pdl: tl.constexpr, bn: tl.constexpr, bu: tl.constexpr,
):  # fmt: skip
    """`spread`: units of a group. `even`: no program has channels that are not there."""
    if pdl:  # In this order: see `engine.cuda.experts.one_row`, which may follow.
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0)
    dtype: tl.constexpr = out.dtype.element_ty
    times: tl.constexpr = 1 if dtype.primitive_bitwidth == 16 else 2
    factor: tl.constexpr = 2 if gate else 1
    expert = tl.load(experts + pair)
    if expert >= count:  # Another rank's.
        return
    channel, unit = tl.arange(0, bn), tl.arange(0, bu)
    zero = (tl.load(experts + tl.minimum(unit, pair)) >> 31)[:, None]
    begin = tl.program_id(1) * bn
    inside = channel < bn if even else begin + channel < width
    row = expert.to(tl.int64) * width * factor + begin
    up_row = row + width
    if not by_token:
        x += pair * units * _UNIT
    coming = _groups(scales, zeros, row, channel, unit, inside, units, spread, has_zeros)
    up_coming = coming
    if gate:
        up_coming = _groups(scales, zeros, up_row, channel, unit, inside, units, spread, has_zeros)
    acc, up = tl.zeros((bu, bn), tl.float32), tl.zeros((bu, bn), tl.float32)
    for first in tl.range(0, units, bu, num_stages=1):  # Copies ahead were slower in every cut.
        at, after = first + unit, first + bu + unit
        groups, up_groups = coming, up_coming
        coming = _groups(scales, zeros, row, channel, after, inside, units, spread, has_zeros)
        left = _units(x, at, units)
        words = _words(values, row, channel, at, inside, units)
        up_words = words
        if gate:
            up_coming = _groups(
                scales, zeros, up_row, channel, after, inside, units, spread, has_zeros
            )
            up_words = _words(values, up_row, channel, at, inside, units)
        for _ in tl.static_range(times):
            pairs, total, row_scale, left = _rounded(left, 15 - times, mxfp4)
            acc += _part(words, groups, pairs, total, row_scale, zero, mxfp4, has_zeros)
            if gate:
                up += _part(up_words, up_groups, pairs, total, row_scale, zero, mxfp4, has_zeros)
    sums = with_bias(tl.sum(acc, axis=0)[:, None], bias, row + channel, inside, has_bias)
    if gate:
        up_sums = tl.sum(up, axis=0)[:, None]
        up_sums = with_bias(up_sums, bias, up_row + channel, inside, has_bias)
        sums = gated(sums, up_sums, dtype, sharpness, shift, limit, form)
    target = out + pair * width + begin + channel
    tl.store(target[:, None], sums, mask=inside[:, None])


def product(
    x: Tensor,
    weights: Stacked,
    experts: Tensor,
    out: Tensor,
    by_token: bool,
    gate: Gate | None,
    cut: Tiles,
) -> None:
    """Fills in `out`, [C, N] or [C, N / 2]. See `engine.cuda.experts.products.product`.

    Args:
        x: [1, K] with `by_token`, else [C, K]; contiguous, in the model's dtype.
        weights: of which `takes` is true.
        experts: [1, C] int32.
        out: in the order of the experts.
        by_token: whether all experts have the same row.
        gate: what is done with gate and up.
        cut: how it is cut; inputs are bytes. There are no stages.
    """
    points = weights.zero_points
    launch(
        _four_bits_row,
        (len(out), pieces_of(out.shape[1], cut.outputs)),
        weights.values.view(torch.int32),
        weights.scales,
        out if points is None else points,
        out if weights.bias is None else weights.bias,
        x,
        out,
        experts,
        weights.shape[0],
        out.shape[1],
        *numbers(gate or Gate())[:3],
        weights.inputs // UNIT,
        weights.group // UNIT,
        by_token,
        gate is not None,
        form_of(gate),
        weights.bias is not None,
        weights.kind is Kind.MXFP4,
        points is not None,
        out.shape[1] % cut.outputs == 0,
        early(),
        cut.outputs,
        cut.inputs * 2 // UNIT,
        num_warps=cut.warps,
        launch_pdl=early(),
    )
