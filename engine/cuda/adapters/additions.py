"""What adapters add to one product on a GPU.

Shapes: T tokens of a step, K inputs of a product, P its parts, M the largest rank, padded.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.adapters.types import Adapter
from engine.cuda.adapters.kernels import (
    BLOCK_N,
    Low,
    Pairs,
    Tiles,
    expand,
    expand_gated,
    shrink,
)
from engine.cuda.adapters.one_row import dot_and_shrink
from engine.model.adapters.sites import parts_of
from engine.model.linear import Linear
from engine.model.precision.dense import Dense
from engine.model.precision.rounding import Rounded, plain_of


class StepTiles:
    """The tokens of the step that runs, for all products."""

    def __init__(self) -> None:
        self.active = False
        """Whether the step has rows with adapters."""
        self.own: dict[int, Tiles] = {}
        """By number of rows: those of all tokens, and of the ends of prompts."""
        self.low: Tensor
        """See `engine.cuda.adapters.kernels.Low`."""


class CudaAddition:
    """What adapters add to one product. See `engine.model.linear.Addition`."""

    def __init__(
        self, linear: Linear, step: StepTiles, slots: int, most: int, dtype: torch.dtype
    ) -> None:
        weight = next(linear.parameters())
        self._step, self._most = step, most
        self._parts = parts_of(linear)
        inputs = self._parts[0].columns.size
        blocks = [
            (number, first, min(first + BLOCK_N, part.outputs.end))
            for number, part in enumerate(self._parts)
            for first in range(part.outputs.start, part.outputs.end, BLOCK_N)
        ]
        zeros = partial(torch.zeros, device=weight.device)
        self.pairs = Pairs(
            zeros(slots, len(self._parts) * most, inputs, dtype=dtype),
            zeros(slots, self._parts[-1].outputs.end, most, dtype=dtype),
            zeros(slots, len(self._parts)),
            zeros(slots, dtype=torch.int32),
            torch.tensor(blocks, dtype=torch.int32, device=weight.device),
        )

    @property
    def active(self) -> bool:
        """See `Addition`."""
        return self._step.active

    def put(self, slot: int, adapter: Adapter) -> None:
        """Queues copies of the pairs that a slot gets."""
        a, b, scales, ranks = (each[slot] for each in self.pairs[:4])
        a.zero_()
        b.zero_()
        rank, factors = 0, [0.0] * len(self._parts)
        for number, part in enumerate(self._parts):
            if (pair := adapter.modules.get(part.module)) is None:
                continue
            own, first = len(pair.a), number * self._most
            a[first : first + own].copy_(pair.a[:, part.columns.slice], non_blocking=True)
            b[part.outputs.slice, :own].copy_(pair.b[part.rows.slice], non_blocking=True)
            rank, factors[number] = max(rank, own), pair.scale
        scales.copy_(torch.tensor(factors))
        ranks.fill_(rank)

    def __call__(self, x: Tensor | Rounded, linear: Linear) -> Tensor:
        """See `Addition`."""
        if not len(plain_of(x)):
            return linear.multiply(x)
        out, own, low = self._begun(x, linear)
        expand(out, self.pairs, own, low)
        return out

    def gated(self, x: Tensor | Rounded, linear: Linear) -> Tensor:
        """[T, inputs] -> [T, I]: silu(gate) * up of a product of gate and up, with what is
        added."""
        out, own, low = self._begun(x, linear)
        return expand_gated(out, self.pairs, own, low)

    def _begun(self, x: Tensor | Rounded, linear: Linear) -> tuple[Tensor, Tiles, Low]:
        """The product, and the first step beside it."""
        plain, method = plain_of(x), linear.method
        own, values = self._step.own[len(plain)], self._step.low
        if len(plain) == 1 and isinstance(method, Dense):
            weight, bias = method.weight, linear.bias
            out, low = dot_and_shrink(plain, weight, bias, self.pairs, own, values)
            return out, own, low
        low = shrink(plain, self.pairs, own, values)
        return linear.multiply(x), own, low
