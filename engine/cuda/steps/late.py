"""Late rows on a GPU: one small kernel looks into pinned memory when the device begins a step.

1. A step that only decodes and expects a row is padded so that it has a free place, and its page
   table has room for one more row. Behind its packed copy goes the kernel.
2. The host may write a row into the step's *slip*, pinned memory that the kernel reads: last of all
   the number of its pages. It is 0 as long as there is no row.
3. The kernel reads that number, then what depends on it, and puts the row into the packed copy and
   its token into the token table. It answers in pinned memory what it has found. The graph behind
   it takes the row as any other.
4. The host reads the answer once the step before has ended, and queues the row's draw from the
   logits of the graph. The next step, which overwrites them, is launched later.

Two slips take turns: the last step but one has ended when a step is launched.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch
from engine.cuda.steps.packing import PackedStep
from engine.cuda.steps.shapes import Shape, Shapes
from engine.step.executor import LateRow, Launched
from engine.step.plan import StepPlan
from engine.types import SCRATCH_PAGE

TAKEN, NOT_TAKEN = 1, 2
"""What the kernel answers; 0: it has not run."""
_HEAD: Final = 4
"""Integers of a slip before its pages: their number, slot, token and position."""
_BLOCK: Final = 256
"""Pages that are copied at a time. Not tuned."""
_LOOK_S: Final = 2e-5
"""Seconds between two looks for an answer that is about to come. Not tuned."""

DrawRow = Callable[[StepPlan, Tensor, Tensor], Launched]
"""Queues the draw of a row: its plan, its logits [1, vocab] and its slot [1]."""


@triton.jit
def _look(
    slip, answer, header, slots, contexts, page_table, token_table,
    head: tl.constexpr, taken: tl.constexpr, not_taken: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    pages = tl.load(slip, volatile=True)
    # Everything below depends on that number, so the device reads it later.
    here = pages > 0
    slot = tl.load(slip + 1, mask=here, other=0, volatile=True)
    token = tl.load(slip + 2, mask=here, other=0, volatile=True)
    position = tl.load(slip + 3, mask=here, other=0, volatile=True)
    row, width = tl.load(header), tl.load(header + 2)
    tl.store(slots + row, slot, mask=here)
    tl.store(contexts + row, position + 1, mask=here)
    tl.store(token_table + slot, token, mask=here)
    table = page_table + row.to(tl.int64) * width
    for start in range(0, pages, block):
        at = start + tl.arange(0, block)
        inside = at < pages
        tl.store(table + at, tl.load(slip + head + at, mask=inside, volatile=True), mask=inside)
    tl.debug_barrier()  # All have read the header.
    tl.store(header, row + 1, mask=here)
    tl.store(answer, tl.where(here, taken, not_taken))


class CudaLateRows:
    """`LateRows` of the executor on a GPU, which calls `placed`, `with_place`, `look`, `computed`
    and `launched` for each step, in this order."""

    def __init__(
        self, token_table: Tensor, max_pages: int, device: torch.device, draw: DrawRow
    ) -> None:
        pinned = device.type == "cuda"
        self._slips = torch.zeros(2, _HEAD + max_pages, dtype=torch.int32, pin_memory=pinned)
        self._answers = torch.zeros(2, 1, dtype=torch.int32, pin_memory=pinned)
        self._written, self._read = self._slips.numpy(), self._answers.numpy()
        self._token_table = token_table
        self._draw = draw
        self._turn = 0
        self._pages = 0
        """Pages of a row that may come to the next step; 0: none comes."""
        self._room = 0
        """Pages of a row that may come to the step launched last."""
        self._row = 0
        """The place of such a row in that step."""
        self._slots: Tensor | None = None
        self._logits: Tensor | None = None
        self._launched: Launched = Future()

    def begin(self) -> None:
        """A step is about to be launched: the one before takes no row any more."""
        self._room = 0

    def placed(self, shape: Shape | None, plan: StepPlan, shapes: Shapes) -> Shape | None:
        """The shape of a step that takes late rows has a free place, if there is such a shape."""
        if shape is None or not self._pages or not plan.only_decodes or plan.width > 1:
            return shape
        if shape.decodes == plan.num_decodes:
            return shapes.larger(shape)
        return shape

    def with_place(self, plan: StepPlan, shape: Shape) -> StepPlan:
        """The plan with room in its page table for one more row, if there is a place for it."""
        if not (self._pages and plan.only_decodes) or plan.width > 1 or shape.narrowed:
            return plan
        rows, width = plan.page_table.shape
        if rows == shape.decodes:
            return plan
        self._room = min(self._slips.shape[1] - _HEAD, max(width, self._pages))
        table = np.full((rows + 1, self._room), SCRATCH_PAGE, np.int32)
        table[:rows, :width] = plan.page_table
        return replace(plan, page_table=table)

    def look(self, packed: PackedStep, row: int) -> None:
        """Queues the kernel, behind the step's packed copy and before all that reads it. `row`: the
        first free place."""
        if not self._room:
            return
        self._turn ^= 1
        self._written[self._turn, 0] = self._read[self._turn, 0] = 0
        self._row, self._slots = row, packed.slots
        launch(
            _look, (1,), self._slips[self._turn], self._answers[self._turn], packed.header,
            packed.slots, packed.contexts, packed.page_table, self._token_table,
            _HEAD, TAKEN, NOT_TAKEN, _BLOCK, num_warps=1,
        )  # fmt: skip

    def warm(self, packed: PackedStep) -> None:
        """Runs the kernel once, which finds nothing."""
        self._room = 1
        self.look(packed, 0)
        self._room = 0

    def computed(self, logits: Tensor) -> None:
        """The logits of all rows of the step, with those of padding. They stay until the next."""
        self._logits = logits

    def launched(self, future: Launched) -> None:
        """The step is launched, or that has failed."""
        self._launched = future
        if future.done() and future.exception() is not None:
            self._room = 0

    def expect(self, pages: int) -> None:
        """See `LateRows`."""
        self._pages = pages

    def room(self) -> int:
        """See `LateRows`."""
        return self._room

    def offer(self, row: LateRow) -> None:
        """See `LateRows`."""
        slip, count = self._written[self._turn], len(row.pages)
        slip[1:_HEAD] = row.slot, row.token, row.position
        slip[_HEAD : _HEAD + count] = row.pages
        slip[0] = count  # Last: an x86 core's stores are seen in their order.

    def is_taken(self) -> bool:
        """See `LateRows`. The device begins the step as soon as the one before has ended, so the
        answer is there, or about to come."""
        self._room = 0
        answer = self._read[self._turn]
        while not (answer[0] or self._launched.done()):
            time.sleep(_LOOK_S)
        return bool(answer[0] == TAKEN)

    def draw(self, plan: StepPlan) -> Launched:
        """See `LateRows`."""
        assert self._logits is not None, "the step was launched"
        assert self._slots is not None, "the step was launched"
        here = slice(self._row, self._row + 1)
        return self._draw(plan, self._logits[here], self._slots[here])
