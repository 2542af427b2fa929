"""Products of one row with the weights of its experts, in 16 bits or FP8. Memory is the only limit.

A row has each expert once. So nothing is sorted, and a program belongs to a pair and to some output
channels, whose weights it asks for at once: tensor cores would want more rows than there are. FP8
weights want a rounded row. Each program rounds the row itself while its weights come, which costs
less than a kernel before it.

Both products start while the kernel before still runs (`engine.cuda.early`):

1. The first product reads the experts, which the kernel just before it may have written. So it
   waits first. Then it lets the second product start.
2. The second product reads the experts and asks for their weights before it waits. That is safe: a
   program of it starts when every program of the first product has waited, or has ended. So what
   wrote the experts has ended by then, and its writes are visible. They are read from the cache
   that all processors share, since a processor's own may hold those of a layer before.
3. The second product reads its rows, and writes, after it has waited. So has the first product
   ended then, and all that it waited for.

An expert that all tokens share may have weights like the others', in tensors of its own. It is then
one more pair behind the row's own, which takes three to four kernels away.

Shapes: C experts of the row, N output channels and K input channels of an expert.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.experts.beside import Alike
from engine.cuda.experts.cutting import Tiles, with_bias
from engine.cuda.experts.routing import form_of, gated, numbers
from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.cuda.products.own_rounding import (
    KINDS,
    asked,
    most_of,
    read,
    rounding_of,
    scales_asked,
    times,
)
from engine.model.experts.config import Gate
from engine.model.experts.stacked import Stacked

_BYTES: Final = 8192
"""Bytes of a weight that a program asks for at once."""
_MOST_INPUTS: Final = 4096
"""Inputs that a program reads at once; longer rows take several turns, so that they fit its
registers."""
_MOST_ROUNDED, _ROUNDED = 2048, 1024
"""Inputs of FP8 weights above which a program reads fewer, as many as the second, so that what it
rounds serves more outputs (H200, eight experts: 7,168 inputs 312 -> 123 us, 4,096: 66 -> 51).
With 2,048 inputs, and merges of narrow heads cut, a step of Qwen3-30B-A3B took 2.74 for 2.55 ms."""


def tiles_of(weights: Stacked) -> Tiles:
    """By shapes alone. Where inputs of 16 bits take several turns, fewer outputs have room."""
    size, inputs = weights.values.element_size(), power_of_2(weights.inputs)
    if size == 1 and inputs > _MOST_ROUNDED:
        return Tiles(_BYTES // _ROUNDED, _ROUNDED, 1)
    inputs = min(_MOST_INPUTS, inputs)
    size = size if inputs >= weights.inputs else 4
    return Tiles(max(1, _BYTES // (size * inputs)), inputs, 1)


@triton.jit
def _finished(acc, scale, bias, row, inside, has_bias: tl.constexpr):
    """Sums [bn, 1] of products, with scales by channel and biases."""
    total = tl.sum(acc, axis=1, keep_dims=True) * scale[:, None]
    return with_bias(total, bias, row, inside, has_bias)


def _named(specialised: Any) -> str:
    """As profiles show a product."""
    return "_one_row_gate_up" if specialised.constants["gate"] else "_one_row_down"


@triton.jit(repr=_named)
def _one_row(
    values, scales, bias, x, given, out, experts, shared_values, shared_scales, count,
    width, sharpness, shift, limit,
    inputs: tl.constexpr, by_token: tl.constexpr, gate: tl.constexpr, form: tl.constexpr,
    has_bias: tl.constexpr, has_shared: tl.constexpr, kind: tl.constexpr, group: tl.constexpr,
    pdl: tl.constexpr, bn: tl.constexpr, bk: tl.constexpr,
):  # fmt: skip
    if pdl:
        if by_token:
            gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0)
    channel = tl.program_id(1) * bn + tl.arange(0, bn)
    inside = channel < width
    factor: tl.constexpr = 2 if gate else 1
    if has_shared:
        is_shared = pair == tl.num_programs(0) - 1
        expert = tl.load(experts + pair, mask=~is_shared, other=0, cache_modifier=".cg")
        values = tl.where(is_shared, shared_values, values)
        scales = tl.where(is_shared, shared_scales, scales)
    else:
        expert = tl.load(experts + pair, cache_modifier=".cg")
    if expert >= count:  # Another rank's.
        if pdl and not by_token:
            gdc_wait()
        return
    row = expert.to(tl.int64) * width * factor + channel
    at = tl.arange(0, bk)
    coming = asked(values, row, at, inputs, inside)
    scale = scales_asked(scales, row, inside, kind)
    up_coming, up_scale = coming, scale
    if gate:
        up_coming = asked(values, row + width, at, inputs, inside)
        up_scale = scales_asked(scales, row + width, inside, kind)
    if not by_token:
        x += pair * inputs
        if pdl:
            gdc_wait()
    most = 0.0
    if group == 0:
        most = most_of(x, inputs, bk)
    acc, up = tl.zeros((bn, bk), tl.float32), tl.zeros((bn, bk), tl.float32)
    for first in tl.static_range(0, inputs, bk):
        weight, up_weight = coming, up_coming
        if first + bk < inputs:
            coming = asked(values, row, first + bk + at, inputs, inside)
            if gate:
                up_coming = asked(values, row + width, first + bk + at, inputs, inside)
        taken = read(x, first + at, inputs, most, given, group)
        acc += times(taken, weight, scales, row, first + at, inputs, kind)
        if gate:
            up += times(taken, up_weight, scales, row + width, first + at, inputs, kind)
    total = _finished(acc, scale, bias, row, inside, has_bias)
    if gate:
        up_total = _finished(up, up_scale, bias, row + width, inside, has_bias)
        dtype: tl.constexpr = out.dtype.element_ty
        total = gated(total, up_total, dtype, sharpness, shift, limit, form)
    target = out + pair * width + channel
    tl.store(target[:, None], total, mask=inside[:, None])


def product(
    x: Tensor,
    weights: Stacked,
    experts: Tensor,
    out: Tensor,
    by_token: bool,
    gate: Gate | None,
    cut: Tiles,
    shared: Alike | None = None,
) -> None:
    """Fills in `out`, [C, N] or [C, N / 2]. See `engine.cuda.experts.products.product`.

    Args:
        x: [1, K] with `by_token`, else [C, K]; contiguous, in the model's dtype.
        weights: in 16 bits or FP8.
        experts: [1, C] int32.
        out: in the order of the experts. With `shared` it has a row more.
        by_token: whether all experts have the same row. If not, the kernel before is the product
            that made the rows: it waits before it lets this one start.
        gate: what is done with gate and up.
        cut: how it is cut.
        shared: the weight of an expert behind the others.
    """
    given, group = rounding_of(weights.input, out)
    launch(
        _one_row,
        (len(out), pieces_of(out.shape[1], cut.outputs)),
        weights.values,
        out if weights.scales is None else weights.scales,
        out if weights.bias is None else weights.bias,
        x,
        given,
        out,
        experts,
        weights.values if shared is None else shared.values,
        out if shared is None or shared.scales is None else shared.scales,
        weights.shape[0],
        out.shape[1],
        *numbers(gate or Gate())[:3],
        weights.inputs,
        by_token,
        gate is not None,
        form_of(gate),
        weights.bias is not None,
        shared is not None,
        KINDS[weights.kind],
        group,
        early(),
        cut.outputs,
        cut.inputs,
        num_warps=cut.warps,
        launch_pdl=early(),
    )
