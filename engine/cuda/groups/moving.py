"""Tokens of an expert group through memory that its GPUs share; see `engine.cuda.groups.kernels`.

Shapes: T tokens of this worker, R rows of each of N, C chosen experts of a token, H what experts
read and give.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.cuda.experts.summing import Parts
from engine.cuda.groups import kernels
from engine.cuda.kernels import launch, power_of_2
from engine.cuda.ranks.shared import Phases, Shared
from engine.model.experts.routing import Chosen

_ALIGNED: Final = 16
"""Bytes that a thread moves at once: sections begin at multiples of them."""
_BOTH: Final = (0, 1)
"""All phases of a call."""


class Rows(NamedTuple):
    """The rows that each worker of a step brings."""

    each: int
    slots: Tensor | None = None
    """[T] int32. None: each of this worker's is a token."""
    nobody: int = 0
    """The slot of those that are none."""


def fits(shared: Shared, x: Tensor, rows: int, chosen: int) -> bool:
    """Whether so many rows of each worker like those of `x` [T, H] can go so, and their sums."""
    *_, gathered = _places(x, rows, chosen)
    sums = rows * shared.ranks * x.shape[1] * x.element_size()
    return max(gathered, sums) <= shared.half_bytes


def gather(
    shared: Shared, x: Tensor, chosen: Chosen, rows: Rows, held: int, phases: Phases = _BOTH
) -> tuple[Tensor, Chosen]:
    """Brings the rows of all workers together.

    Args:
        shared: the memory of all.
        x: [T, H], contiguous.
        chosen: among all experts, [T, C] each.
        rows: of each worker, at least T.
        held: how many experts this worker has.
        phases: all of them, but in tests.

    Returns:
        [N R, H], and [N R, C] each, among this worker's experts. Those of others have the number
        behind the last, and the weight 0.
    """
    (tokens, size), places = x.shape, chosen.weights.shape[1]
    every, block = rows.each * shared.ranks, power_of_2(size)
    out = x.new_empty(every, size)
    weights = chosen.weights.new_empty(every, places)
    experts = torch.empty(every, places, dtype=torch.int32, device=x.device)
    weights_at, experts_at, _ = _places(x, rows.each, places)
    launch(
        kernels.gather_tokens,
        (len(shared.calls),),
        *shared.tables,
        x,
        chosen.weights,
        chosen.experts.int(),
        chosen.experts if rows.slots is None else rows.slots,
        out,
        weights,
        experts,
        shared.rank,
        tokens,
        rows.each,
        shared.half_bytes,
        weights_at,
        experts_at,
        rows.nobody,
        held,
        rows.slots is not None,
        size,
        places,
        shared.ranks,
        *phases,
        block,
        power_of_2(places),
        num_warps=_warps(block),
    )
    return out, Chosen(weights, experts)


def scatter(shared: Shared, parts: Parts, tokens: int, rows: int, phases: Phases = _BOTH) -> Tensor:
    """What `gather` brought together goes back as sums.

    Args:
        shared: the memory of all.
        parts: of the rows of all workers; its shared expert is of this worker's tokens.
        tokens: of this worker.
        rows: of each worker.
        phases: all of them, but in tests.

    Returns:
        [T, H]
    """
    size, block = parts.parts.shape[1], power_of_2(parts.parts.shape[1])
    out = parts.parts.new_empty(tokens, size)
    *beside, has_shared, has_gate = parts.beside
    launch(
        kernels.scatter_sums,
        (len(shared.calls),),
        *shared.tables,
        parts.parts,
        parts.order.places,
        parts.weights,
        *beside,
        out,
        shared.rank,
        tokens,
        rows,
        shared.half_bytes // out.element_size(),
        size,
        parts.weights.shape[1],
        shared.ranks,
        has_shared,
        has_gate,
        *phases,
        block,
        num_warps=_warps(block),
    )
    return out


def _places(x: Tensor, rows: int, chosen: int) -> tuple[int, int, int]:
    """Bytes of a half before the weights and before the experts of so many rows, and of all."""
    weights_at = _whole(rows * x.shape[1] * x.element_size())
    experts_at = weights_at + _whole(rows * chosen * 4)
    return weights_at, experts_at, experts_at + _whole(rows * chosen * 4)


def _whole(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _warps(block: int) -> int:
    return max(4, min(16, block // 512))
