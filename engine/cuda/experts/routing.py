"""Kernels around the products of experts: the choice, the order of pairs, the activation.

A *pair* is a token with one of its experts: token * C + place. Every result is at a place that
follows from the input alone, so equal inputs give equal bits.

A rank that holds some experts whole numbers its own from 0 on. All others have the number behind
the last, and the weight 0: their pairs come last, and no kernel computes or adds them. So a grid
follows from the number of rows alone here, too.

Shapes: T tokens, C chosen experts of each, P = T C pairs, E experts that the rank holds, I the
width.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.cuda.products.rounding import PLAIN, block_of, room, store_rounded, warps_of
from engine.model.experts.config import EACH, Gate, Held, Routing, Scores
from engine.model.experts.routing import LEAST_SUM, Chosen, held
from engine.model.experts.routing import route as route_by_torch
from engine.model.precision.rounding import Rounded, Rounding

_SOFTMAX: Final = tl.constexpr(0)
_SIGMOID: Final = tl.constexpr(1)
_OF_CHOSEN: Final = tl.constexpr(2)
_KINDS: Final = {Scores.SOFTMAX: 0, Scores.SIGMOID: 1, Scores.SOFTMAX_OF_CHOSEN: 2}
_LIMITED: Final = tl.constexpr(1)
_GELU: Final = tl.constexpr(2)
_NO_EXPERT: Final = tl.constexpr(1 << 30)
_PAIRS_AT_ONCE: Final = 2048
"""Pairs that a program looks at in a turn. Not tuned: counting them is no part that shows."""
_COLUMNS: Final = 1024
"""Columns of a program, one pass over memory. Not tuned."""
_TAKEN: Final = 4096
"""Columns of a row that a program copies. Not tuned."""


# -- the choice ---------------------------------------------------------------------------------


@triton.jit
def _route(
    logits, bias, weights, experts, count, factor, least, rank, ranks,
    chosen: tl.constexpr, kind: tl.constexpr, normalised: tl.constexpr, has_bias: tl.constexpr,
    parts: tl.constexpr, pdl: tl.constexpr, block: tl.constexpr, places: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < count
    value = tl.load(logits + row * count + at, mask=inside, other=float("-inf")).to(tl.float32)
    if kind == _SIGMOID:
        score = tl.where(inside, tl.sigmoid(value), 0.0)
    elif kind == _SOFTMAX:
        powers = tl.exp(value - tl.max(value))
        score = powers / tl.sum(powers)
    else:
        score = value
    left = score
    if has_bias:
        left += tl.load(bias + at, mask=inside, other=0.0)
    # What is no number, or minus infinity, is chosen last, and once. Its weight shows it.
    left = tl.where(inside, tl.where(left >= -3e38, left, -3e38), float("-inf"))
    place = tl.arange(0, places)
    found = tl.zeros((places,), tl.int32)
    weight = tl.full((places,), float("-inf"), tl.float32)
    for number in tl.static_range(chosen):
        best = tl.argmax(left, axis=0, tie_break_left=True)
        own = tl.sum(tl.where(at == best, score, 0.0))
        found = tl.where(place == number, best, found)
        weight = tl.where(place == number, own, weight)
        left = tl.where(at == best, float("-inf"), left)
    used = place < chosen
    if kind == _OF_CHOSEN:
        powers = tl.exp(weight - tl.max(weight))
        weight = powers / tl.sum(powers)
    else:
        if normalised:
            weight = weight / tl.maximum(tl.sum(tl.where(used, weight, 0.0)), least)
        weight = weight * factor
    if parts:
        own = found % ranks == rank
        found = tl.where(own, found // ranks, (count - rank + ranks - 1) // ranks)
        weight = tl.where(own, weight, 0.0)
    tl.store(weights + row * chosen + place, weight, mask=used)
    tl.store(experts + row * chosen + place, found, mask=used)


def route(logits: Tensor, routing: Routing, bias: Tensor | None, which: Held = EACH) -> Chosen:
    """See `engine.model.experts.routing.route` and `held`; experts are int32. Groups are
    PyTorch's."""
    if routing.groups > 1:
        found = route_by_torch(logits, routing, bias)
        found = found._replace(experts=found.experts.int())
        return held(found, len(which.of(routing.experts)), which)
    shape = logits.shape[0], routing.chosen
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    launch(
        _route,
        shape[:1],
        logits,
        logits if bias is None else bias,
        weights,
        experts,
        routing.experts,
        routing.factor,
        LEAST_SUM,
        *which,
        routing.chosen,
        _KINDS[routing.scores],
        routing.normalised,
        bias is not None,
        which != EACH,
        early(),
        power_of_2(routing.experts),
        power_of_2(routing.chosen),
        num_warps=1,
        launch_pdl=early(),
    )
    return Chosen(weights, experts)


# -- the order ----------------------------------------------------------------------------------


class Order(NamedTuple):
    """The pairs, expert by expert, but of one token as they were chosen. All int32."""

    pairs: Tensor
    """[P], those of an expert ascend."""
    places: Tensor
    """[P], where each pair stands in `pairs`."""
    starts: Tensor
    """[E + 1], where each expert begins, and where the last one ends."""
    experts: Tensor
    """[T, C], as they were chosen."""
    ranks: int = 1
    """Among which the experts are divided: of so many pairs one is expected here."""


@triton.jit(do_not_specialize=["count"])
def _sort(experts, pairs, places, starts, total, count, counts: tl.constexpr, block: tl.constexpr):
    expert = tl.program_id(0)
    before = tl.zeros((block,), tl.int32)
    for first in range(0, count, block):
        at = first + tl.arange(0, block)
        found = tl.load(experts + at, mask=at < count, other=_NO_EXPERT)
        before += (found < expert).to(tl.int32)
    place = tl.sum(before)
    tl.store(starts + expert, place)
    if counts:
        tl.atomic_add(total, place.to(tl.int64), mask=expert == tl.num_programs(0) - 1)
    for first in range(0, count, block):
        at = first + tl.arange(0, block)
        found = tl.load(experts + at, mask=at < count, other=_NO_EXPERT)
        own = (found == expert).to(tl.int32)
        target = place + tl.cumsum(own, 0) - 1
        tl.store(pairs + target, at, mask=own == 1)
        tl.store(places + at, target, mask=own == 1)
        place += tl.sum(own)


def sort(experts: Tensor, count: int, ranks: int = 1, total: Tensor | None = None) -> Order:
    """Sorts the pairs of [T, C] int32 experts, of `count` that the rank holds. Those of one token
    are left as they are, since it has each expert once: `starts` is nothing then. Of several tokens
    the number of pairs that the rank computes is added to `total`, [1] int64."""
    if experts.shape[0] == 1:
        numbered = _numbered(experts.shape[1], experts.device)
        return Order(numbered, numbered, numbered, experts, ranks)
    pairs = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
    places = torch.empty_like(pairs)
    starts = torch.empty(count + 1, dtype=torch.int32, device=experts.device)
    every = pairs.shape[0]
    block = min(_PAIRS_AT_ONCE, power_of_2(every))
    counts, into = total is not None, starts if total is None else total
    launch(_sort, (count + 1,), experts, pairs, places, starts, into, every, counts, block)
    return Order(pairs, places, starts, experts, ranks)


@cache
def _numbered(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


@triton.jit
def _take(
    x, x_scales, pairs, rows, scales, size, places, scaled: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = (tl.load(pairs + row) // places).to(tl.int64)
    at = part * block + tl.arange(0, block)
    inside = at < size
    tl.store(rows + row * size + at, tl.load(x + token * size + at, mask=inside), mask=inside)
    if scaled:
        tl.store(scales + row, tl.load(x_scales + token), mask=part == 0)


def take(x: Tensor | Rounded, order: Order) -> Tensor | Rounded:
    """[T, K], rounded with a scale by row or not -> [P, K], the row of each pair's token."""
    plain, x_scales = (x, x) if isinstance(x, Tensor) else x[:2]
    pairs, size = order.pairs.shape[0], plain.shape[1]
    rows = torch.empty(pairs, size, dtype=plain.dtype, device=plain.device)
    scaled, scales = isinstance(x, Rounded), rows
    if scaled:
        scales = torch.empty(pairs, 1, dtype=x_scales.dtype, device=plain.device)
    block = min(_TAKEN, power_of_2(size))
    arguments = (plain, x_scales, order.pairs, rows, scales, size, order.experts.shape[1])
    launch(_take, (pairs, pieces_of(size, block)), *arguments, scaled, block)
    return Rounded(rows, scales) if scaled else rows


# -- between the products -----------------------------------------------------------------------


@triton.jit
def gated(opening, up, dtype: tl.constexpr, sharpness, shift, limit, form: tl.constexpr):
    """What an expert does with gate and up, in float32; both were rounded to `dtype`. `form`: see
    `form_of`."""
    opening, up = opening.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if form == _LIMITED:
        opening = tl.where(opening > limit, limit, opening)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    steep = opening * sharpness
    if form == _GELU:  # (1 + tanh(x)) / 2 is the sigmoid of 2 x.
        steep = 1.5957691216057308 * (opening + 0.044715 * opening * opening * opening)
    opening = (opening * tl.sigmoid(steep)).to(dtype).to(tl.float32)
    return opening * (up + shift)


@triton.jit(do_not_specialize=["stride"])
def _activate(
    gate_up, out, scales, given, own, width, stride, sharpness, shift, limit,
    parts: tl.constexpr, form: tl.constexpr, group: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if parts:  # noqa: SIM102 (Triton would load it in any case)
        if row >= tl.load(own):
            return
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    opening = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0)
    dtype: tl.constexpr = gate_up.dtype.element_ty
    value = gated(opening, up, dtype, sharpness, shift, limit, form)
    if group == PLAIN:
        tl.store(out + row * width + at, value, mask=inside)
    else:
        value = value.to(dtype).to(tl.float32)
        most = tl.max(tl.abs(value))
        store_rounded(value, most, out, scales, given, row, at, inside, width, stride, group)


def activate(
    gate_up: Tensor, gate: Gate, order: Order | None = None, how: Rounding | None = None
) -> Tensor | Rounded:
    """[R, 2 I], gate then up -> [R, I], rounded or not. `order`: that of the rows; None: all are
    the rank's own."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out: Tensor | Rounded
    if how is None:
        out = values = scales = gate_up.new_empty(rows, width)
        stride, group, block = 1, PLAIN.value, _COLUMNS
    else:
        out, stride, group = room(gate_up, width, how)
        values, scales, _ = out
        block = block_of(width, group)
    parts = order is not None and order.ranks > 1
    own = order.starts[-1:] if order is not None and parts else gate_up
    *by, form = numbers(gate)
    given = scales if how is None or how.scale is None else how.scale
    arguments = (gate_up, values, scales, given, own, width, stride, *by)
    grid, warps = (rows, pieces_of(width, block)), 4 if how is None else warps_of(block)
    launch(_activate, grid, *arguments, parts, form, group, block, num_warps=warps)
    return out


def numbers(gate: Gate) -> tuple[float, float, float, int]:
    """The last arguments of `gated`."""
    return gate.sharpness, gate.shift, gate.limit or 0.0, form_of(gate)


def form_of(gate: Gate | None) -> int:
    """Which formula `gated` computes: 0 the plain one, 1 with limits, 2 GELU by tanh."""
    if gate is None:
        return 0
    return _GELU.value if gate.gelu else int(gate.limit is not None)
