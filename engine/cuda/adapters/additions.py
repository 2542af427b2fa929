"""What adapters add to one product on a GPU.

Shapes: T tokens of a step, K inputs of a product, P its parts, M the largest rank, padded.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Final

import torch
from torch import Tensor

from engine.adapters.types import Adapter
from engine.cuda.adapters.kernels import (
    BLOCK_N,
    LONG,
    Low,
    Pairs,
    Tiles,
    expand,
    expand_gated,
    shrink,
)
from engine.cuda.adapters.one_row import one_row, one_row_gated
from engine.cuda.products import sixteen_bits
from engine.model.adapters.sites import parts_of
from engine.model.linear import Linear
from engine.model.precision.dense import Dense
from engine.model.precision.rounding import Rounded, plain_of

_BEHIND: Final = 16 << 20
"""Bytes of A of all slots that may lie behind a weight. Each product of few tokens reads them, used
or not. A Hopper reads so many in 4 to 5 us, which is about what it takes to launch `shrink` and to
wait for it. Not tuned."""


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
        self,
        linear: Linear,
        step: StepTiles,
        scales: Tensor,
        ranks: Tensor,
        most: int,
        dtype: torch.dtype,
    ) -> None:
        """`scales` and `ranks`: see `Pairs`."""
        slots = len(ranks)
        weight = next(linear.parameters())
        self._step, self._most = step, most
        self._parts = parts_of(linear)
        inputs = self._parts[0].columns.size
        blocks = [
            (number, first, min(first + BLOCK_N, part.outputs.end))
            for number, part in enumerate(self._parts)
            for first in range(part.outputs.start, part.outputs.end, BLOCK_N)
        ]
        ends = [part.outputs.end for part in self._parts]
        width = len(self._parts) * most
        self._behind: Tensor | None = None
        """[outputs + slots * P * M, K]: the weight, and A of all slots behind it; None: they lie
        apart."""
        self._bias: Tensor | None = None
        """The bias, and zeros for A."""
        zeros = partial(torch.zeros, device=weight.device)
        if slots * width * inputs * dtype.itemsize <= _BEHIND and isinstance(linear.method, Dense):
            a = self._put_behind(linear, linear.method, slots * width).view(slots, width, inputs)
        else:
            a = zeros(slots, width, inputs, dtype=dtype)
        self.pairs = Pairs(
            a,
            zeros(slots, ends[-1], most, dtype=dtype),
            scales,
            ranks,
            torch.tensor(blocks, dtype=torch.int32, device=weight.device),
            torch.tensor(ends, dtype=torch.int32, device=weight.device),
            gcd(16, *ends),
        )

    def _put_behind(self, linear: Linear, method: Dense, rows: int) -> Tensor:
        """Moves the weight to memory with room for so many rows behind it. Returns those."""
        for each in (method.weight, linear.bias):
            if each is None:
                continue
            whole = each.new_zeros(len(each) + rows, *each.shape[1:])
            whole[: len(each)].copy_(each)
            each.data = whole[: len(each)]
            if each is method.weight:
                self._behind = whole
            else:
                self._bias = whole
        torch.cuda.empty_cache()  # What a weight leaves does not fit the next one.
        assert self._behind is not None
        return self._behind[-rows:]

    @property
    def active(self) -> bool:
        """See `Addition`."""
        return self._step.active

    def put(self, slot: int, adapter: Adapter) -> tuple[list[float], int]:
        """Queues copies of the pairs that a slot gets. Returns its scales and its rank. A and B are
        zero beyond a pair's rank: kernels multiply them up to the largest rank of all parts, and
        what the former A gives there may be infinite, which times zero is no number.

        With one rank, pairs are pinned and nothing waits. Several map theirs, which are not pinned:
        those copies wait for what is queued."""
        a, b = self.pairs.a[slot], self.pairs.b[slot]
        rank, scales = 0, [0.0] * len(self._parts)
        for number, part in enumerate(self._parts):
            own, first, ours = 0, number * self._most, b[part.outputs.slice]
            if (pair := adapter.modules.get(part.module)) is not None:
                own = len(pair.a)
                a[first : first + own].copy_(pair.a[:, part.columns.slice], non_blocking=True)
                ours[:, :own].copy_(pair.b[part.rows.slice], non_blocking=True)
                rank, scales[number] = max(rank, own), pair.scale
            if own < self._most:
                a[first + own : first + self._most].zero_()
                ours[:, own:].zero_()
        return scales, rank

    def __call__(self, x: Tensor | Rounded, linear: Linear) -> Tensor:
        """See `Addition`."""
        plain, method = plain_of(x), linear.method
        if not len(plain):
            return linear.multiply(x)
        own = self._step.own[len(plain)]
        if len(plain) == 1 and isinstance(method, Dense):
            return one_row(plain, method.weight, linear.bias, self.pairs, own, self._step.low)
        return expand(*self._begun(x, linear, own))

    def gated(self, x: Tensor | Rounded, linear: Linear) -> Tensor:
        """[T, inputs] -> [T, I]: silu(gate) * up of a product of gate and up, with what is
        added."""
        plain, method = plain_of(x), linear.method
        own = self._step.own[len(plain)]
        if len(plain) == 1 and isinstance(method, Dense):
            return one_row_gated(plain, method.weight, linear.bias, self.pairs, own, self._step.low)
        return expand_gated(*self._begun(x, linear, own))

    def _begun(
        self, x: Tensor | Rounded, linear: Linear, own: Tiles
    ) -> tuple[Tensor, Pairs, Tiles, Low]:
        """The product, and the first step beside it or in it."""
        plain = plain_of(x)
        if self._behind is None or len(plain) >= LONG:
            low = shrink(plain, self.pairs, own, self._step.low)
            return linear.multiply(x), self.pairs, own, low
        both = sixteen_bits.linear(plain, self._behind, self._bias)
        values = both[:, self.pairs.b.shape[1] :]
        return both, self.pairs, own, Low(values, 0, both.stride(0))
