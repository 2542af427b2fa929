"""The executor: runs planned steps on the device, one after the other.

`launch` returns at once. The device works through launched steps like a CUDA stream. On a CPU the
stream is one thread, so the step loop plans the next step while this one computes, by the same
rules as on a GPU.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.step.plan import StepPlan, StepResult
from engine.step.sampling import Masks

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


class NullExecutor:
    """Computes nothing: every token is 0. It is for tests and for measuring the step loop alone."""

    def shaped(self, plan: StepPlan) -> StepPlan:
        """Nothing to decide."""
        return plan

    def launch(self, plan: StepPlan) -> Launched:
        """A step that is done already."""
        count = len(plan.sample_slots)
        done: Future[StepResult] = Future()
        done.set_result(
            StepResult(np.zeros(count, np.int32), np.ones(count, np.bool_), None, None, None)
        )
        return done

    def mask_bits(self, count: int) -> NDArray[np.int32]:
        """Masks of one word."""
        return np.zeros((count, 1), np.int32)

    def sample(self, masks: Masks | None) -> None:
        """Nothing to draw."""

    def shutdown(self) -> None:
        """Nothing to stop."""
