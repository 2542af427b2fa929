"""Chooses the time at which a step is launched: in time for the device, and not much earlier.

A step that is launched too early waits on the device for a whole step, and no request that arrives
meanwhile can join it. A step that is launched shortly before the one in flight ends takes all
requests that have arrived, and the device does not wait.

So the end of the step in flight is predicted. A decode step takes about as long as the last two
took. The next step is launched earlier than that end by the lead. What the host takes for a launch,
and how late it wakes, need not be known: the lead grows by a part of the time for which the device
ran dry, and each step takes a little away, so that the device idles for `IDLE_SHARE` of the time.

The end of a step with prompts is predicted from the rate of computing prompts, which is less exact.
New work is launched behind it after `NEARLY` of its time. Work that is ready when a step with
prompts is launched follows it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from engine.step.plan import StepPlan

NEARLY: Final = 0.75
"""Share of the predicted time of a step with prompts after which the next one is launched."""
IDLE_SHARE: Final = 0.01
"""Share of the time for which the device may idle because a launch was late: it costs so much of
the tokens. With a third of it an arriving request waits longer (`bench/README.md`)."""
LEARNT: Final = 0.1
"""Share of the idle time by which the lead grows. With a half it follows single launches that take
long, and an arriving request waits longer (`bench/README.md`)."""


class Pacer(Protocol):
    """Says when the next step is launched. It sees every settled step, in order."""

    def wait_s(self, in_flight: StepPlan, began: float, prompts_s: float) -> float:
        """Seconds until the step behind `in_flight` should be prepared; 0: now.

        Args:
            in_flight: the step that the device runs.
            began: time at which the device began it, by this clock.
            prompts_s: usual duration of its prompts, seconds; 0 while unknown.
        """
        ...

    def holds(self, in_flight: StepPlan) -> bool:
        """Whether the step is about to end once another one is launched behind it."""
        ...

    def settled(self, plan: StepPlan, step_s: float, idle_s: float = 0.0) -> None:
        """The step is done.

        Args:
            plan: of the step.
            step_s: it took so long on the device.
            idle_s: the device then waited so long for a step that was launched behind it; 0 or less
                if that was there before.
        """
        ...


class Unpaced:
    """Steps are launched as soon as there are some: how many may be in flight is their pace."""

    def wait_s(self, in_flight: StepPlan, began: float, prompts_s: float) -> float:
        """See `Pacer`."""
        return 0.0

    def holds(self, in_flight: StepPlan) -> bool:
        """See `Pacer`."""
        return False

    def settled(self, plan: StepPlan, step_s: float, idle_s: float = 0.0) -> None:
        """See `Pacer`."""


class LaunchPacer:
    """Computes the time for the next launch."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent_s: tuple[float, float] = (0.0, 0.0)
        """Durations of the last two decode steps, seconds."""
        self.lead_s = 0.0
        """How long before the end of a decode step the next one is prepared, seconds."""

    def wait_s(self, in_flight: StepPlan, began: float, prompts_s: float) -> float:
        """See `Pacer`."""
        if in_flight.only_decodes:
            due = began + min(self._recent_s) - self.lead_s
        else:
            due = began + NEARLY * prompts_s
        return max(0.0, due - self._clock())

    def holds(self, in_flight: StepPlan) -> bool:
        """See `Pacer`."""
        return in_flight.only_decodes

    def settled(self, plan: StepPlan, step_s: float, idle_s: float = 0.0) -> None:
        """See `Pacer`."""
        if not plan.only_decodes:
            return
        self._recent_s = (self._recent_s[1], step_s)
        learnt_s = LEARNT * (min(max(0.0, idle_s), step_s) - IDLE_SHARE * step_s)
        self.lead_s = min(max(0.0, self.lead_s + learnt_s), step_s)
