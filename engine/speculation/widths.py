"""How many tokens of each row a step computes."""

from __future__ import annotations

from typing import Protocol

from engine.step.plan import StepPlan, StepResult


class Widths(Protocol):
    """Chooses the width of steps. It belongs to the step loop's thread."""

    most: int
    """The largest width."""

    def choose(self, rows: int, room: int) -> int:
        """Tokens of each row in the next step, 1 to `most`, if it has so many decode rows, and room
        for so many tokens of each. 1: no draft is verified."""
        ...

    def settled(self, plan: StepPlan, result: StepResult, step_s: float) -> None:
        """A step has settled, which took so many seconds."""
        ...


class FixedWidth:
    """Always the same width: where a column without a draft costs nothing, as in
    `engine.speculation.verifying`."""

    def __init__(self, most: int) -> None:
        self.most = most

    def choose(self, rows: int, room: int) -> int:
        """See `Widths`."""
        return max(1, min(self.most, room))

    def settled(self, plan: StepPlan, result: StepResult, step_s: float) -> None:
        """See `Widths`."""
