"""Steps of a worker of an expert group, whose failures the others must not wait for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.step.executor import Executor, Launched
from engine.step.plan import StepPlan
from engine.step.sampling import Masks


class GroupExecutor:
    """Says at once when a step has failed."""

    def __init__(self, own: Executor, failed: Callable[[], None]) -> None:
        """`failed` is called before `own` runs its next step."""
        self._own = own
        self._failed = failed

    def shaped(self, plan: StepPlan) -> StepPlan:
        """See `Executor`."""
        return self._own.shaped(plan)

    def launch(self, plan: StepPlan) -> Launched:
        """See `Executor`."""
        launched = self._own.launch(plan)
        launched.add_done_callback(self._look)
        return launched

    def mask_bits(self, count: int) -> NDArray[np.int32]:
        """See `Executor`."""
        return self._own.mask_bits(count)

    def sample(self, masks: Masks | None) -> None:
        """See `Executor`."""
        self._own.sample(masks)

    def shutdown(self) -> None:
        """See `Executor`."""
        self._own.shutdown()

    def _look(self, launched: Launched) -> None:
        if launched.exception() is not None:
            self._failed()
