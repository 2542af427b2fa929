"""Late rows of the executor with PyTorch: they join when the device's thread begins the step."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from engine.step.executor import LateRow, Launched, with_row
from engine.step.plan import StepPlan


class LateStep:
    """A launched step, and the row that joins it."""

    def __init__(self, pages: int) -> None:
        self._lock = threading.Lock()
        self._row: LateRow | None = None
        self._begun = False
        self.pages = pages
        """Pages that a row may have; 0: it takes none."""
        self.hidden: Tensor | None = None
        """[1, H], of the row."""

    def offer(self, row: LateRow) -> None:
        """The step has the row, unless it has begun."""
        with self._lock:
            self._row = None if self._begun else row

    def begin(self, plan: StepPlan) -> StepPlan:
        """The plan with the row, which is its last one then. On the device's thread."""
        with self._lock:
            self._begun = True
        return plan if self._row is None else with_row(plan, self._row)

    def computed(self, hidden: Tensor) -> None:
        """[T, H], of all tokens of the step. On the device's thread."""
        if self._row is not None:
            self.hidden = hidden[-1:]

    def is_taken(self) -> bool:
        """Whether the step has a row. From now on it takes none."""
        with self._lock:
            self._begun = True
        return self._row is not None


class TorchLateRows:
    """`LateRows` of a step that the device's thread begins."""

    def __init__(self, draw: Callable[[LateStep, StepPlan], Launched]) -> None:
        """`draw`: queues the draw of the row that a step has, by its plan."""
        self._draw = draw
        self._pages = 0
        self._step = LateStep(0)

    def launched(self, plan: StepPlan) -> LateStep:
        """A step is launched, which takes late rows if it only decodes."""
        self._step = LateStep(self._pages if plan.only_decodes else 0)
        return self._step

    def expect(self, pages: int) -> None:
        """See `LateRows`."""
        self._pages = pages

    def room(self) -> int:
        """See `LateRows`."""
        return self._step.pages

    def offer(self, row: LateRow) -> None:
        """See `LateRows`."""
        self._step.offer(row)

    def is_taken(self) -> bool:
        """See `LateRows`."""
        return self._step.is_taken()

    def draw(self, plan: StepPlan) -> Launched:
        """See `LateRows`."""
        return self._draw(self._step, plan)
