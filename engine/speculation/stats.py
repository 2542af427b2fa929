"""What became of drafts, since the start."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from engine.loads import SpeculationLoad

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.step.plan import StepPlan, StepResult


class DraftStats:
    """Counts drafts. It belongs to the step loop's thread."""

    def __init__(self, most: int) -> None:
        """`most`: the most drafts of a row."""
        self._drafted = np.zeros(most, np.int64)
        self._accepted = np.zeros(most, np.int64)
        self._steps: Counter[int] = Counter()

    def settled(self, plan: StepPlan, result: StepResult, alive: NDArray[np.bool_]) -> None:
        """A step has settled. Drafts of sequences that are gone do not count."""
        if plan.num_decodes == 0 or result.counts is None or result.drafted is None:
            return
        own = alive[: plan.num_decodes]
        self._steps[plan.width] += 1
        drafted = np.bincount(result.drafted[: plan.num_decodes][own], minlength=1)
        accepted = np.bincount(result.counts[: plan.num_decodes][own], minlength=2)[1:]
        for total, counts in ((self._drafted, drafted), (self._accepted, accepted)):
            # Rows with at least 1, 2, ... drafts.
            rows = counts[::-1].cumsum()[::-1][1:]
            total[: len(rows)] += rows

    def load(self) -> SpeculationLoad:
        """Counts so far."""
        return SpeculationLoad(
            drafted_by_position=tuple(self._drafted.tolist()),
            accepted_by_position=tuple(self._accepted.tolist()),
            steps_by_width=dict(self._steps),
        )
