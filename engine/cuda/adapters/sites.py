"""Where adapters add on a GPU. Pairs of a few adapters lie in memory of fixed size, so graphs may
read them; a step's tiles are copied before it runs.

Shapes: T tokens of a step, K inputs of a product, P its parts, M the largest rank, padded.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.adapters.slots import NO_SLOT, Wanted
from engine.adapters.types import Adapter
from engine.cuda.adapters.kernels import BLOCK_N, TILE, Pairs, Tiles, add_pairs, splits_of
from engine.cuda.steps.shapes import Shape
from engine.cuda.steps.staging import ALIGNMENT, Int32s, StepStaging
from engine.model.adapters.sites import parts_of
from engine.model.linear import Linear
from engine.step.plan import StepPlan


class CudaAdapterSites:
    """All products of a model that take adapters."""

    def __init__(
        self, linears: list[Linear], slots: int, most_rank: int, dtype: torch.dtype
    ) -> None:
        """Takes the memory of the pairs.

        Args:
            linears: the products.
            slots: adapters that are there at once.
            most_rank: of an adapter.
            dtype: of the pairs.
        """
        self._slots = slots
        most = -(-most_rank // TILE) * TILE
        self.active = False
        """Whether the step has rows with adapters."""
        self._additions = [_Addition(each, self, slots, most, dtype) for each in linears]
        for linear, addition in zip(linears, self._additions, strict=True):
            linear.addition = addition
        self._width = max((len(each.pairs.a[0]) for each in self._additions), default=0)
        self._device = self._additions[0].pairs.a.device
        self._contents: dict[int, bytes] = {}
        self._own: dict[int, Tiles] = {}
        """By number of rows: those of all tokens, and of the ends of prompts."""
        self.low = torch.zeros(0, device=self._device)
        self._staging: StepStaging

    def reserve(self, tokens: int, rows: int) -> None:
        """Takes memory for steps of so many tokens and rows."""
        integers = sum(
            count + 3 * self._tiles(count) + 2 * ALIGNMENT for count in (tokens, tokens, rows)
        )
        self._staging = StepStaging(integers, self._device)
        sizes = [min(count, tokens) for count in (*range(TILE, 33 * TILE, TILE), tokens)]
        most = max(splits_of(self._tiles(size)) * size for size in sizes)
        self.low = torch.zeros(most * self._width, device=self._device)

    def load(self, wanted: Wanted) -> None:
        """Queues copies of what slots must have."""
        for slot, adapter in wanted:
            if self._contents.get(slot) != adapter.digest:
                for addition in self._additions:
                    addition.put(slot, adapter)
                self._contents[slot] = adapter.digest

    def pack(self, plan: StepPlan | None, shape: Shape) -> None:
        """Queues the copy of a step's tiles, before its kernels. No plan: no row has an adapter."""
        self.active = shape.adapted
        if not shape.adapted:
            return
        tokens = np.full(shape.tokens, NO_SLOT, np.int32)
        ends = np.full(shape.decode_tokens + shape.prompt_rows, NO_SLOT, np.int32)
        if plan is not None and plan.adapters.size:
            real, first = plan.num_decodes, shape.decode_tokens
            decodes = np.repeat(plan.adapters[:real], shape.width)
            prompts = np.repeat(plan.adapters[real:], plan.query_lens[real:])
            tokens[: len(decodes)] = ends[: len(decodes)] = decodes
            tokens[first:][: len(prompts)] = prompts
            ends[first:][: len(plan.row_slots) - real] = plan.adapters[real:]
        self._staging.begin()
        self._own = {len(ends): self._place(ends)} if len(ends) else {}
        self._own[len(tokens)] = self._place(tokens)
        self._staging.upload()

    def of(self, rows: int) -> Tiles:
        """The tiles of a product with so many rows."""
        return self._own[rows]

    def _place(self, slots: Int32s) -> Tiles:
        order, tiles = tiles_of(slots, self._tiles(len(slots)))
        return Tiles(self._staging.add(order), self._staging.add(tiles))

    def _tiles(self, tokens: int) -> int:
        return min(tokens, -(-tokens // TILE) + self._slots)


def tiles_of(slots: NDArray[np.int32], most: int) -> tuple[Int32s, Int32s]:
    """Sorts tokens by slot, and cuts them into at most so many tiles. See `Tiles`."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    by_slot, tiles = slots[order], np.zeros((most, 3), np.int32)
    tiles[:, 0] = NO_SLOT
    found, begins, counts = np.unique(by_slot, return_index=True, return_counts=True)
    number = 0
    for slot, begin, count in zip(found.tolist(), begins.tolist(), counts.tolist(), strict=True):
        if slot == NO_SLOT:
            continue
        for first in range(begin, begin + count, TILE):
            tiles[number] = slot, first, min(TILE, begin + count - first)
            number += 1
    return order, tiles


class _Addition:
    """What adapters add to one product. See `engine.model.linear.Addition`."""

    def __init__(
        self, linear: Linear, sites: CudaAdapterSites, slots: int, most: int, dtype: torch.dtype
    ) -> None:
        weight = next(linear.parameters())
        self._sites, self._most = sites, most
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
        return self._sites.active

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

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `Addition`."""
        if self._sites.active and len(x):
            add_pairs(x, out, self.pairs, self._sites.of(len(x)), self._sites.low)
        return out
