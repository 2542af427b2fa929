"""Which experts a token takes, and with which weights: one function for all families.

Equal scores go to the expert with the lowest number, on every device.

Shapes: T tokens, E experts, C chosen ones of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.experts.config import EACH, Held, Routing, Scores

LEAST_SUM = 1e-20
"""What sums of sigmoids are divided by, at least."""


class Chosen(NamedTuple):
    """The experts of each token, the best first."""

    weights: Tensor
    """[T, C] float32."""
    experts: Tensor
    """[T, C] int64 or int32, all different within a row. Among those of a rank (`held`), its own
    ones are."""


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> Chosen:
    """Chooses by a router's logits.

    Args:
        logits: [T, E], any floating type; computed with in float32, or float64 as they are.
        routing: how.
        bias: [E] float32 where the routing has a bias.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if routing.scores is Scores.SOFTMAX_OF_CHOSEN:
        best = _best(logits, routing.chosen)
        return Chosen(logits.gather(1, best).softmax(1), best)
    scores = logits.sigmoid() if routing.scores is Scores.SIGMOID else logits.softmax(1)
    candidates = scores if bias is None else scores + bias
    best = _best(_open(candidates, routing), routing.chosen)
    weights = scores.gather(1, best)
    if routing.normalised:
        weights = weights / weights.sum(1, keepdim=True).clamp_min(LEAST_SUM)
    return Chosen(weights * routing.factor, best)


def held(chosen: Chosen, count: int, which: Held) -> Chosen:
    """The choice among the experts that a rank holds.

    Args:
        chosen: of all experts.
        count: how many of them the rank holds.
        which: these.

    Returns:
        Numbers among the rank's own. Others have the number behind the last, and the weight 0.
    """
    if which == EACH:
        return chosen
    own = chosen.experts % which.ranks == which.rank
    numbers = torch.where(own, chosen.experts // which.ranks, count)
    return Chosen(torch.where(own, chosen.weights, 0.0), numbers.to(chosen.experts.dtype))


def _open(scores: Tensor, routing: Routing) -> Tensor:
    """Scores, minus infinity in groups that are closed."""
    if routing.groups == 1:
        return scores
    groups = scores.view(len(scores), routing.groups, -1)
    worth = groups.topk(routing.best_of_group, 2).values.sum(2)
    is_open = torch.zeros_like(worth, dtype=torch.bool)
    is_open.scatter_(1, _best(worth, routing.open_groups), True)
    opened: Tensor = groups.masked_fill(~is_open[:, :, None], float("-inf")).flatten(1)
    return opened


def _best(scores: Tensor, count: int) -> Tensor:
    """[T, count] places of the largest, the first of equals first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
