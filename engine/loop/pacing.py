"""Chooses the time at which a step is launched: in time for the device, and not much earlier.

A step that is launched too early waits on the device for a whole step, and no request that arrives
meanwhile can join it. A step that is launched shortly before the one in flight ends takes all
requests that have arrived, and the device does not wait.

So the end of the step in flight is predicted. A decode step takes about as long as the last two
took. The next step is launched earlier than that end by the lead: what nine of ten launches take of
the host's time, and a little more. The lead is longer while the device ran dry too often: each miss
adds to it, and each step takes a little away, so that the device idles for `IDLE_SHARE` of the time
at most. The longest launch would be a bad lead: one that takes 3 ms once in thirty would hold up
every request by as much.

The end of a step with prompts is predicted from the rate of computing prompts, which is less exact.
New work is launched behind it after `NEARLY` of its time. Work that is ready when a step with
prompts is launched follows it at once.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from engine.step.plan import StepPlan

SLACK_S: Final = 3e-4
"""Extra lead, seconds: the event loop may hold the interpreter this long when the wait is over."""
NEARLY: Final = 0.75
"""Share of the predicted time of a step with prompts after which the next one is launched."""
LAUNCHES: Final = 64
"""Launches that are remembered."""
SHARE: Final = 0.9
"""Share of the launches that the lead covers."""
IDLE_SHARE: Final = 0.01
"""Share of the time for which the device may idle because a launch was late."""
MISS_S: Final = 2e-4
"""Idle time of the device that counts as a miss, seconds."""
_STEPS_TO_LEARN: Final = 0.5
"""Share of a miss that the lead grows by."""


class LaunchPacer:
    """Computes the time for the next launch. It is told of every launched and settled step, in
    order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent_s: tuple[float, float] = (0.0, 0.0)
        """Durations of the last two decode steps, seconds."""
        self._launches_s: deque[float] = deque(maxlen=LAUNCHES)
        """The host's times from waking up to the end of a launch, seconds."""
        self._launch_s = 0.0
        """What most of them took."""
        self._more_s = 0.0
        """Lead beyond that, seconds, while the device runs dry."""
        self.misses = 0
        """Steps behind which the device idled for `MISS_S` or more."""
        self._woke = clock()

    def wait_s(self, in_flight: StepPlan, began: float, prompts_s: float) -> float:
        """Seconds until the step behind `in_flight` should be prepared; 0: now.

        Args:
            in_flight: the step that the device runs.
            began: time at which the device began it, by this clock.
            prompts_s: usual duration of its prompts, seconds; 0 while unknown.
        """
        if in_flight.only_decodes:
            due = began + min(self._recent_s) - self.lead_s
        else:
            due = began + NEARLY * prompts_s
        return max(0.0, due - self._clock())

    def woke(self) -> None:
        """The host begins to prepare a step."""
        self._woke = self._clock()

    def launched(self) -> None:
        """The step is launched."""
        self._launches_s.append(self._clock() - self._woke)
        ranked = sorted(self._launches_s)
        self._launch_s = ranked[math.ceil(SHARE * len(ranked)) - 1]

    @property
    def lead_s(self) -> float:
        """How long before the end of a decode step the next one is prepared, seconds."""
        return self._launch_s + self._more_s + SLACK_S

    def settled(self, plan: StepPlan, step_s: float, idle_s: float = 0.0) -> None:
        """The step is done.

        Args:
            plan: of the step.
            step_s: it took so long on the device.
            idle_s: the device then waited so long for a step that was launched behind it.
        """
        if not plan.only_decodes:
            return
        self._recent_s = (self._recent_s[1], step_s)
        is_miss = idle_s >= MISS_S
        self.misses += is_miss
        learnt_s = _STEPS_TO_LEARN * (idle_s * is_miss - IDLE_SHARE * step_s)
        self._more_s = min(max(0.0, self._more_s + learnt_s), step_s)
