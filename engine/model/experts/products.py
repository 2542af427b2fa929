"""The sum over a token's experts. Nothing adds in an order that may differ from run to run, and
nothing here waits for a device, but with a part of the experts.

Shapes: T tokens, C chosen experts of each, P = T C pairs, E experts that
the rank holds, H hidden size, I the width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.experts.config import EACH, Gate, Held
from engine.model.experts.counting import PairCount
from engine.model.experts.routing import Chosen, held
from engine.model.experts.weights import ExpertWeights


class Sorted(NamedTuple):
    """The pairs of a token and an expert, expert by expert."""

    order: Tensor
    """[P] int64: token * C + place among the token's experts. Tokens of an expert ascend."""
    counts: Tensor
    """[E] int64, pairs of each expert."""


def by_expert(experts: Tensor, count: int) -> Sorted:
    """Sorts the pairs of [T, C] experts, of `count` in all. Larger numbers come last, uncounted."""
    found, order = experts.flatten().sort(stable=True)
    bounds = torch.arange(count + 1, device=found.device, dtype=found.dtype)
    starts = torch.searchsorted(found, bounds)
    return Sorted(order, starts.diff())


def activated(gate_up: Tensor, gate: Gate) -> Tensor:
    """[R, 2 I], gate then up, or [R, I] where there is no gate -> [R, I]."""
    if gate.squared:
        return F.relu(gate_up).square()
    opening, up = gate_up.chunk(2, dim=-1)
    if gate.gelu:
        return F.gelu(opening, approximate="tanh") * up
    if gate.limit is not None:
        opening, up = opening.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    opening = opening * torch.sigmoid(opening * gate.sharpness)
    return opening * (up if gate.shift == 0 else up + gate.shift)


def mixed(
    x: Tensor,
    chosen: Chosen,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    gate: Gate,
    which: Held = EACH,
    computed: PairCount | None = None,
) -> Tensor:
    """The sum of each token's experts by their weights, added in float32, the best expert first.

    Args:
        x: [T, H].
        chosen: experts and weights of each token, of all experts.
        gate_up: to [.., 2 I], or [.., I].
        down: to [.., H].
        gate: what lies between them.
        which: the experts of these weights. The sum is over those.
        computed: counts their pairs.

    Returns:
        [T, H]
    """
    (tokens, places), count = chosen.experts.shape, len(gate_up.parts)
    chosen = held(chosen, count, which)
    order, counts = by_expert(chosen.experts, count)
    if which != EACH:
        order = order[: int(counts.sum())]
    if computed is not None:
        computed.add(len(order))
    rows = x.index_select(0, order // places)
    out = down.product(activated(gate_up.product(rows, counts), gate), counts)
    back = out.new_zeros(tokens * places, out.shape[1])
    back[order] = out
    summed = back.view(tokens, places, -1).float() * chosen.weights[:, :, None]
    return summed.sum(1).to(x.dtype)
