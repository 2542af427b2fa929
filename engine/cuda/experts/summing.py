"""The sum over a token's experts by their weights, added in float32, the best expert first.

Where the residual and a norm follow, the sum is theirs: one kernel does it all, so the sum never
goes through memory.

Shapes: T tokens, C chosen experts of each, P = T C pairs, H hidden size.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.experts.routing import Order
from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.cuda.products.rounding import PLAIN, room, store_rounded, warps_of
from engine.model.precision.rounding import Rounded, Rounding

_COLUMNS: Final = 1024
"""Columns of a program, one pass over memory. Not tuned."""


class Shared(NamedTuple):
    """The output of an expert that all tokens share."""

    out: Tensor
    """[T, H], contiguous."""
    x: Tensor
    """[T, H], contiguous: what its gate reads."""
    gate: Tensor | None
    """[1, H]: `out` is multiplied by the sigmoid of the product with `x`; None: there is no
    gate."""


class Parts(NamedTuple):
    """What is left to be added up."""

    parts: Tensor
    """[P, H], of each pair, expert by expert."""
    order: Order
    weights: Tensor
    """[T, C] float32."""
    shared: Shared | None = None
    """Is added to the sum."""

    @property
    def beside(self) -> tuple[Tensor, Tensor, Tensor, bool, bool]:
        """The shared expert as kernels take it: its three tensors, and which are there."""
        if self.shared is None:
            return self.parts, self.parts, self.parts, False, False
        out, x, gate = self.shared
        return out, x, x if gate is None else gate, True, gate is not None


@triton.jit
def sum_of_pairs(parts, places, weights, token, at, inside, size, chosen: tl.constexpr):
    """A part of a token's sum, float32. No load waits for another pair's. What has no weight may be
    no number: an expert of another rank."""
    total = tl.zeros(at.shape, tl.float32)
    for number in tl.static_range(chosen):
        place = tl.load(places + token * chosen + number).to(tl.int64)
        weight = tl.load(weights + token * chosen + number)
        there = inside & (at < tl.where(weight == 0.0, 0, size))
        part = tl.load(parts + place * size + at, mask=there, other=0.0).to(tl.float32)
        total += part * weight
    return total


@triton.jit
def with_shared(
    total, shared, x, gate, token, at, inside, size, has_gate: tl.constexpr, whole: tl.constexpr
):  # fmt: skip
    """A part of a token's sum with the shared expert's output, float32. It is rounded where
    `engine.model.experts.layer` rounds."""
    dtype: tl.constexpr = shared.dtype.element_ty
    value = tl.load(shared + token * size + at, mask=inside, other=0.0).to(tl.float32)
    if has_gate:
        every = tl.arange(0, whole)
        there = every < size
        read = tl.load(x + token * size + every, mask=there, other=0.0).to(tl.float32)
        weight = tl.load(gate + every, mask=there, other=0.0).to(tl.float32)
        opened = tl.sigmoid(tl.sum(read * weight).to(dtype).to(tl.float32))
        value = (value * opened.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return (total.to(dtype).to(tl.float32) + value).to(dtype).to(tl.float32)


@triton.jit
def _add_up(
    parts, places, weights, shared, x, gate, out, size, has_shared: tl.constexpr,
    has_gate: tl.constexpr, chosen: tl.constexpr, whole: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    total = sum_of_pairs(parts, places, weights, token, at, inside, size, chosen)
    if has_shared:
        total = with_shared(total, shared, x, gate, token, at, inside, size, has_gate, whole)
    tl.store(out + token * size + at, total, mask=inside)


def add_up(given: Parts) -> Tensor:
    """[T, H]"""
    parts, order, weights, _ = given
    (tokens, chosen), size = weights.shape, parts.shape[1]
    out = parts.new_empty(tokens, size)
    grid = (tokens, pieces_of(size, _COLUMNS))
    *shared, has_shared, has_gate = given.beside
    blocks = power_of_2(size), _COLUMNS
    known = has_shared, has_gate, chosen, *blocks
    launch(_add_up, grid, parts, order.places, weights, *shared, out, size, *known)
    return out


@triton.jit(do_not_specialize=["stride"])
def _add_up_norm(
    residual, parts, places, weights, shared, x, gate, gain, values, scales, plain, given, eps,
    size, stride, has_shared: tl.constexpr, has_gate: tl.constexpr, chosen: tl.constexpr,
    keeps: tl.constexpr, pdl: tl.constexpr, group: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    dtype: tl.constexpr = residual.dtype.element_ty
    gains = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    if pdl:
        gdc_wait()
    own = tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
    value = sum_of_pairs(parts, places, weights, row, at, inside, size, chosen)
    if has_shared:
        value = with_shared(value, shared, x, gate, row, at, inside, size, has_gate, block)
    total = (value.to(dtype).to(tl.float32) + own).to(dtype)
    tl.store(residual + row * size + at, total, mask=inside)
    value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    value = (value * scale * gains).to(dtype)
    if keeps:
        tl.store(plain + row * size + at, value, mask=inside)
    if group == PLAIN:
        tl.store(values + row * size + at, value, mask=inside)
    else:
        value = value.to(tl.float32)
        most = tl.max(tl.abs(value))
        store_rounded(value, most, values, scales, given, row, at, inside, size, stride, group)


def add_up_norm(
    residual: Tensor, x: Parts, weight: Tensor, eps: float, how: Rounding | None
) -> Tensor | Rounded:
    """Adds the sum to `residual` [T, H] in place; returns the norm of that, rounded or not."""
    (tokens, chosen), size = x.weights.shape, residual.shape[1]
    block = power_of_2(size)
    keeps = how is not None and how.keeps
    plain = values = residual.new_empty(tokens, size) if how is None or keeps else residual
    out: Tensor | Rounded = plain
    if how is None:
        scales, stride, group = x.weights, 1, PLAIN.value
    else:
        done, stride, group = room(residual, size, how)
        values, scales, _ = done
        out = done._replace(plain=plain) if keeps else done
    *shared, has_shared, has_gate = x.beside
    launch(
        _add_up_norm,
        (tokens,),
        residual,
        x.parts,
        x.order.places,
        x.weights,
        *shared,
        weight,
        values,
        scales,
        plain,
        scales if how is None or how.scale is None else how.scale,
        eps,
        size,
        stride,
        has_shared,
        has_gate,
        chosen,
        keeps,
        early(),
        group,
        block,
        num_warps=warps_of(block),
        launch_pdl=early(),
    )
    return out
