"""When a step is launched: no later than the device needs it, and not much earlier.

A step that is launched while the one before it has only just begun waits on the device for a whole
step, and no request that arrives meanwhile can join it. A step that is launched shortly before the
one in flight ends takes along all requests that have arrived, and the device waits for nothing.

So the end is predicted. A decode step takes about as long as the last two took. The next one is
launched ahead of that end by the lead: twice what the host needed to launch the last steps, and a
little more. A step with prompts is predicted from the rate of computing prompts, less exactly: what
comes meanwhile is launched behind it when `NEARLY` of its time is over. What is ready when a step
with prompts is launched follows it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from engine.schedule.step import StepPlan

SLACK_S: Final = 3e-4
"""The event loop may hold the interpreter for so long when the wait is over."""
NEARLY: Final = 0.75
"""Share of the predicted time of a step with prompts."""
FORGET: Final = 0.95
"""Each launch keeps this much of the longest launch seen."""


class LaunchPacer:
    """Told of every step launched and settled, in order; says when to launch the next one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent_s: tuple[float, float] = (0.0, 0.0)
        """How long the last two decode steps took."""
        self._launch_s = 0.0
        """What the host takes from waking up to having launched."""
        self._woke = clock()

    def wait_s(self, in_flight: StepPlan, began: float, prompts_s: float) -> float:
        """Seconds until the step behind `in_flight` should be prepared; 0: now.

        Args:
            in_flight: the step that the device works at.
            began: when the device began with it, by this clock.
            prompts_s: what its prompts usually take, seconds; 0 while unknown.
        """
        if in_flight.only_decodes:
            due = began + min(self._recent_s) - 2 * self._launch_s - SLACK_S
        else:
            due = began + NEARLY * prompts_s
        return max(0.0, due - self._clock())

    def woke(self) -> None:
        """The host begins to prepare a step."""
        self._woke = self._clock()

    def launched(self) -> None:
        """The step is launched."""
        self._launch_s = max(self._clock() - self._woke, FORGET * self._launch_s)

    def settled(self, plan: StepPlan, step_s: float) -> None:
        """The step is done, and took so long on the device."""
        if plan.only_decodes:
            self._recent_s = (self._recent_s[1], step_s)
