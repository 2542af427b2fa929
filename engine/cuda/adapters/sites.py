"""Where adapters add on a GPU. Pairs of a few adapters lie in memory of fixed size, so graphs may
read them; a step's tiles are copied before it runs.

Shapes: T tokens of a step, K inputs of a product, P its parts, M the largest rank, padded.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.adapters.slots import NO_SLOT, Wanted
from engine.cuda.adapters.additions import CudaAddition, StepTiles
from engine.cuda.adapters.kernels import TILE, Tiles, size_of, splits_of
from engine.cuda.steps.shapes import Shape
from engine.cuda.steps.staging import ALIGNMENT, Int32s, StepStaging
from engine.model.adapters.sites import parts_of
from engine.model.linear import Linear
from engine.step.plan import StepPlan


class _BySlot:
    """Numbers of all products, which change together for one slot: in one copy."""

    def __init__(
        self, counts: list[int], slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`counts`: numbers of each product."""
        self._values = torch.zeros(slots * sum(counts), dtype=dtype, device=device)
        sizes, places = [slots * count for count in counts], torch.arange(len(self._values))
        self.views = [
            own.view(slots, count)
            for own, count in zip(torch.split(self._values, sizes), counts, strict=True)
        ]
        """[slots, count] of each product."""
        own = [of.view(slots, -1) for of in torch.split(places, sizes)]
        self._places = torch.cat(own, dim=1).to(device)

    def put(self, slot: int, numbers: list[float] | list[int]) -> None:
        """Queues the copy of a slot's numbers."""
        values = torch.tensor(numbers, dtype=self._values.dtype)
        if self._values.is_cuda:
            values = values.pin_memory()  # Else the copy waits for the steps before.
        values = values.to(self._values.device, non_blocking=True)
        self._values.index_copy_(0, self._places[slot], values)


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
        self._step = StepTiles()
        self._device = next(linears[0].parameters()).device
        parts = [len(parts_of(each)) for each in linears]
        self._scales = _BySlot(parts, slots, torch.float32, self._device)
        self._ranks = _BySlot([1] * len(linears), slots, torch.int32, self._device)
        own = zip(linears, self._scales.views, self._ranks.views, strict=True)
        self._additions = [
            CudaAddition(linear, self._step, scales, ranks.flatten(), most, dtype)
            for linear, scales, ranks in own
        ]
        for linear, addition in zip(linears, self._additions, strict=True):
            linear.addition = addition
        self._width = max(len(each.pairs.a[0]) for each in self._additions)
        self._contents: dict[int, bytes] = {}
        self._staging: StepStaging

    def reserve(self, tokens: int, rows: int, buffers: int) -> None:
        """Takes memory for steps of so many tokens and rows, and of as many staging buffers as
        steps have."""
        integers = sum(
            count + 3 * self._tiles(count) + 2 * ALIGNMENT for count in (tokens, tokens, rows)
        )
        self._staging = StepStaging(integers, self._device, buffers)
        counts = range(1, max(tokens, rows) + 1)
        most = max(splits_of(self._tiles(count)) * count for count in counts)
        self._step.low = torch.zeros(most * self._width, device=self._device)

    def load(self, wanted: Wanted) -> None:
        """Queues copies of what slots must have."""
        for slot, adapter in wanted:
            if self._contents.get(slot) != adapter.digest:
                told = [addition.put(slot, adapter) for addition in self._additions]
                self._scales.put(slot, [each for scales, _ in told for each in scales])
                self._ranks.put(slot, [rank for _, rank in told])
                self._contents[slot] = adapter.digest

    def pack(self, plan: StepPlan | None, shape: Shape) -> None:
        """Queues the copy of a step's tiles, before its kernels. No plan: no row has an adapter."""
        self._step.active = shape.adapted
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
        self._step.own = {len(ends): self._place(ends)} if len(ends) else {}
        self._step.own[len(tokens)] = self._place(tokens)
        self._staging.upload()

    def _place(self, slots: Int32s) -> Tiles:
        size = size_of(len(slots))
        order, tiles = tiles_of(slots, self._tiles(len(slots)), size)
        return Tiles(self._staging.add(order), self._staging.add(tiles), size)

    def _tiles(self, tokens: int) -> int:
        """The most tiles of so many tokens: each slot may leave one that is not full."""
        return min(tokens, -(-tokens // size_of(tokens)) + self._slots)


def tiles_of(slots: NDArray[np.int32], most: int, size: int) -> tuple[Int32s, Int32s]:
    """Sorts tokens by slot, and cuts them into at most so many tiles of this size. See `Tiles`."""
    order = np.argsort(slots, kind="stable").astype(np.int32)
    by_slot, tiles = slots[order], np.zeros((most, 3), np.int32)
    tiles[:, 0] = NO_SLOT
    found, begins, counts = np.unique(by_slot, return_index=True, return_counts=True)
    number = 0
    for slot, begin, count in zip(found.tolist(), begins.tolist(), counts.tolist(), strict=True):
        for first in range(begin, begin + count, size):
            tiles[number] = slot, first, min(size, begin + count - first)
            number += 1
    return order, tiles
