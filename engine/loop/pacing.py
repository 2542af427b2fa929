"""Chooses the time at which a step is launched: in time for the device, and not much earlier.

A step that is launched too early waits on the device for a whole step, and no request that arrives
meanwhile can join it. A step that is launched shortly before the one in flight ends takes all
requests that have arrived, and the device does not wait.

So the end of the step in flight is predicted. A decode step takes about as long as the last two
took. The next step is launched earlier than that end by the lead: twice the host's time for the
last launches, and a little more. The end of a step with prompts is predicted from the rate of
computing prompts, which is less exact. New work is launched behind it after `NEARLY` of its time.
Work that is ready when a step with prompts is launched follows it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from engine.step.plan import StepPlan

SLACK_S: Final = 3e-4
"""Extra lead, seconds: the event loop may hold the interpreter this long when the wait is over."""
NEARLY: Final = 0.75
"""Share of the predicted time of a step with prompts after which the next one is launched."""
FORGET: Final = 0.95
"""Factor by which the longest launch seen decays at each launch."""


class LaunchPacer:
    """Computes the time for the next launch. It is told of every launched and settled step, in
    order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent_s: tuple[float, float] = (0.0, 0.0)
        """Durations of the last two decode steps, seconds."""
        self._launch_s = 0.0
        """The host's time from waking up to the end of the launch, seconds."""
        self._woke = clock()

    def wait_s(self, in_flight: StepPlan, began: float, prompts_s: float) -> float:
        """Seconds until the step behind `in_flight` should be prepared; 0: now.

        Args:
            in_flight: the step that the device runs.
            began: time at which the device began it, by this clock.
            prompts_s: usual duration of its prompts, seconds; 0 while unknown.
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
        """The step is done; it took `step_s` seconds on the device."""
        if plan.only_decodes:
            self._recent_s = (self._recent_s[1], step_s)
