"""When a step is launched: no later than the device needs it, and not much earlier.

A step that is launched while the one before it has only just begun waits on the device for a whole
step, and nobody who arrives meanwhile can join it: a delivered request then waits half a step for
the one that runs, and a whole one for the one that is queued. Launched shortly before the one that
runs ends, the next step takes along whatever arrived until then, and the device waits for nothing.

The end is predicted: a decode step takes about what the last ones took, from the end of the step
before it. One that is done before that was shorter, nobody knows by how much, as its end was slept
through: what was known is forgotten, and nothing waited for until two steps have been timed anew.
Otherwise a few slow steps would make all that follow as slow, since each would seem to take as long
as it was waited for. The lead is what the host took to get a step launched, twice, and a little
more. A step with prompts is not predicted that well, and none is waited for: what follows it is
launched at once. Where nothing does, `look_s` says how often to look whether it is done; prompts
that come meanwhile are launched behind it when it is `NEARLY` done, all that have come until then
in one step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.step import StepPlan

SLACK_S = 3e-4
"""For a late wake-up: the event loop may hold the interpreter meanwhile."""
LOOK_S = 5e-3
"""How often who waits looks whether the step is done already."""
NEARLY = 0.75
"""Share of what a step with prompts is expected to take, which is not known any better."""
SELDOM_S = 1e-3
OFTEN_S = 1e-4
"""How often who has nothing to launch behind a step with prompts looks whether it is done: a client
waits for the end of most."""
FORGET = 0.95
"""Each turn lets go of this much of the longest launch seen."""


class LaunchPacer:
    """Told of every step launched and settled, in order; knows how long to wait in between."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._recent_s: tuple[float, float] = (0.0, 0.0)
        """How long the last two decode steps took."""
        self._launch_s = 0.0
        """What the host takes from waking up to having launched."""
        self._woke = clock()

    def wait_s(self, in_flight: StepPlan, began: float) -> float:
        """Seconds until the step behind `in_flight` should be prepared; 0: now.

        Args:
            in_flight: the step that the device works at.
            began: when the device began with it, by this clock.
        """
        if not is_decode(in_flight):
            return 0.0
        lead = 2 * self._launch_s + SLACK_S
        return max(0.0, began + min(self._recent_s) - lead - self._clock())

    def overslept(self) -> None:
        """The step in flight was done before its predicted end."""
        self._recent_s = (0.0, 0.0)

    def woke(self) -> None:
        """The host begins to prepare a step."""
        self._woke = self._clock()

    def launched(self) -> None:
        """The step is launched."""
        self._launch_s = max(self._clock() - self._woke, FORGET * self._launch_s)

    def settled(self, plan: StepPlan, step_s: float) -> None:
        """The step is done, and took so long on the device."""
        if is_decode(plan):
            self._recent_s = (self._recent_s[1], step_s)


def look_s(ran_s: float, expected_s: float) -> float:
    """How long to leave a step with prompts alone that has run for `ran_s` of about `expected_s`:
    seldom at first, often when it is nearly done, by a long one's measure, which one that is
    overdue is, too."""
    often_s = max(OFTEN_S, max(expected_s, ran_s) / 500)
    return min(max(NEARLY * expected_s - ran_s, often_s), max(SELDOM_S, often_s))


def is_decode(plan: StepPlan) -> bool:
    """Whether the step only decodes: such steps take about as long as each other."""
    return 0 < plan.num_tokens == plan.num_decodes
