"""The executor: runs planned steps on the device, one after the other.

`launch` returns at once. The device works through launched steps like a CUDA stream. On a CPU the
stream is one thread, so the step loop plans the next step while this one computes, by the same
rules as on a GPU.

A *late row* joins a step that is launched, until the device begins it. A step is launched before
the one in flight ends, and waits for the device. A sequence that becomes ready meanwhile would wait
for the step behind it: for a whole step more. So the host *offers* its row, and the device looks
for an offer when it begins the step. The forward pass has the row then. Its draw is queued apart,
once the host knows that the row was taken; so it may draw as any row.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.adapters.slots import NO_SLOT
from engine.step.plan import Int32s, StepPlan, StepResult
from engine.step.sampling import Masks
from engine.types import SCRATCH_PAGE

Launched = Future[StepResult]
"""A launched step. It is done when the device is done, and raises the device's error."""


class Executor(Protocol):
    """Runs steps."""

    def shaped(self, plan: StepPlan) -> StepPlan:
        """The plan with what rank 0 of several decides for all. It is the next to be launched."""
        ...

    def launch(self, plan: StepPlan) -> Launched:
        """Queues a step after those launched before. If the plan has masked rows, the draw of all
        its tokens waits for `sample`."""
        ...

    def mask_bits(self, count: int) -> NDArray[np.int32]:
        """Memory for `count` masks, from which they are sent to the device: [count, W]."""
        ...

    def sample(self, masks: Masks | None) -> None:
        """Queues the draw of the step launched last, which was planned with masked rows. None: it
        needs no masks any more."""
        ...

    def shutdown(self) -> None:
        """Waits for the launched steps and stops."""
        ...


class LateRow(NamedTuple):
    """A row that decodes one token behind those that its pages hold."""

    slot: int
    token: int
    """Its last token, which only the host knows."""
    position: int
    """The position of that token, for which `pages` has one."""
    pages: Int32s
    """[P]"""


class LateRows(Protocol):
    """Belongs to the step loop's thread, as the executor that it is part of. Lengths are known,
    layers keep no states or windows, there is one rank, and no hook is called."""

    def expect(self, pages: int) -> None:
        """A row of at most so many pages may come to the step that is launched next; 0: none."""
        ...

    def room(self) -> int:
        """Pages that a row may have which is offered to the step launched last; 0: it has no place
        for one."""
        ...

    def offer(self, row: LateRow) -> None:
        """Offers a row to that step, one at most. It fits."""
        ...

    def is_taken(self) -> bool:
        """Whether that step has the row that was offered. The step before it has ended. From then
        on the step takes none."""
        ...

    def draw(self, plan: StepPlan) -> Launched:
        """Queues the draw of the row that was taken, the only one of `plan`."""
        ...


class NoLateRows:
    """No step takes any."""

    def expect(self, pages: int) -> None:
        """See `LateRows`."""

    def room(self) -> int:
        """See `LateRows`."""
        return 0

    def offer(self, row: LateRow) -> None:
        """See `LateRows`."""

    def is_taken(self) -> bool:
        """See `LateRows`."""
        return False

    def draw(self, plan: StepPlan) -> Launched:
        """See `LateRows`."""
        raise AssertionError("no row was taken")


def with_row(plan: StepPlan, row: LateRow) -> StepPlan:
    """A plan that only decodes, with the row behind its own. Nothing is drawn of it."""
    more, table = len(row.pages) - plan.page_table.shape[1], plan.page_table
    pages = np.pad(row.pages, (0, max(0, -more)), constant_values=SCRATCH_PAGE)
    table = np.pad(table, ((0, 0), (0, max(0, more))), constant_values=SCRATCH_PAGE)
    return replace(
        plan,
        token_ids=_and(plan.token_ids, 0),
        positions=_and(plan.positions, row.position),
        row_slots=_and(plan.row_slots, row.slot),
        query_lens=_and(plan.query_lens, 1),
        context_lens=_and(plan.context_lens, row.position + 1),
        num_decodes=plan.num_decodes + 1,
        page_table=np.concatenate([table, pages[None]]),
        write_slots=_and(plan.write_slots, row.slot),
        write_tokens=_and(plan.write_tokens, row.token),
        adapters=_and(plan.adapters, NO_SLOT) if plan.adapters.size else plan.adapters,
    )


def _and(values: Int32s, last: int) -> Int32s:
    return np.append(values, np.int32(last))
