"""Logs when streams waited long for a token, and what the loop did in that time.

The time from one step's end to the next is divided among the loop's verbs. Two verbs lie within
others: `commands` within `receive` or `settle`, which else wait for the device; `tokens`, the work
that follows a step's end, within `settle`. A gap is long if it is several times as long as usual,
and at least `LEAST_S`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, NamedTuple

from engine.averages import averaged
from engine.schedule.scheduler import Scheduler
from engine.step.plan import StepPlan

log = logging.getLogger("baton.engine")

LEAST_S: Final = 0.1
"""No gap is long below, seconds."""
LONG: Final = 5.0
"""A gap is long after so many times the usual one."""

STEPS_A_LANE: Final = 4
"""Steps that are remembered for each lane: its rows, and prompts between. Not tuned."""

Verb = Callable[[str], AbstractContextManager[object]]


class _Spent:
    """The time of each verb since it was last taken; verbs may lie within others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.open: list[_Timed] = []
        self._of_name: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, seconds: float) -> None:
        """A verb took so long."""
        self._of_name[name] += seconds

    def take(self) -> dict[str, float]:
        """Seconds by verb. Those that go on begin anew."""
        for timed in self.open:
            timed.note()
        taken = dict(self._of_name)
        self._of_name.clear()
        return taken


class _Timed:
    """Notes the time of one verb."""

    def __init__(self, inner: AbstractContextManager[object], name: str, spent: _Spent) -> None:
        self._inner = inner
        self._name = name
        self._spent = spent
        self._began_s = 0.0

    def note(self) -> None:
        """The verb has taken so long until now."""
        now_s = self._spent.clock()
        self._spent.add(self._name, now_s - self._began_s)
        self._began_s = now_s

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._began_s = self._spent.clock()
        self._spent.open.append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spent.open.pop()
        self.note()
        self._inner.__exit__(kind, error, trace)


class _Ended(NamedTuple):
    """A step that has ended."""

    plan: StepPlan
    at_s: float
    spent_s: dict[str, float]
    """Time of each verb since the step that ended before it."""


class SlowSteps:
    """Belongs to the step loop's thread.

    Args:
        verb: the range of a verb in profiles.
        clock: seconds.
    """

    def __init__(self, verb: Verb, clock: Callable[[], float] = time.monotonic) -> None:
        self._verb = verb
        self._clock = clock
        self._spent = _Spent(clock)
        self._usual_s = 0.0
        self._ended: deque[_Ended] = deque()
        """The last steps, the newest last; with several lanes some for each of them."""

    def verb(self, name: str) -> AbstractContextManager[object]:
        """A range around a verb of the loop."""
        return _Timed(self._verb(name), name, self._spent)

    def settled(self, scheduler: Scheduler, plan: StepPlan, step_s: float) -> None:
        """A step has ended; it took `step_s` seconds on the device."""
        lanes = scheduler.lanes
        self._ended.append(_Ended(plan, self._clock(), self._spent.take()))
        if (since := self._since(plan, has_lanes=not lanes.mixes)) is not None:
            gap_s = since[-1].at_s - since[0].at_s
            is_long = self._usual_s and gap_s > max(LEAST_S, LONG * self._usual_s)
            if is_long and _have_waited(since[0].plan, plan):
                self._report(scheduler, plan, (gap_s, step_s), _together(since[1:]))
            self._usual_s = averaged(self._usual_s, gap_s)
        while len(self._ended) > (1 if lanes.mixes else STEPS_A_LANE * lanes.flights):
            self._ended.popleft()

    def _since(self, plan: StepPlan, *, has_lanes: bool) -> list[_Ended] | None:
        """The steps from the one with whose rows this one goes on up to this one, the last; None:
        it goes on with none. Where all rows decode in each step, that is the one before."""
        ended = list(self._ended)
        if not plan.num_decodes:
            return None
        if not has_lanes:
            return ended if len(ended) > 1 and ended[0].plan.num_decodes else None
        for place in range(len(ended) - 2, -1, -1):
            if _have_waited(ended[place].plan, plan):
                return ended[place:]
        return None

    def _report(
        self,
        scheduler: Scheduler,
        plan: StepPlan,
        times: tuple[float, float],
        spent_s: dict[str, float],
    ) -> None:
        gap_s, step_s = times
        spent_ms = {f"{name}_ms": round(1e3 * s, 1) for name, s in spent_s.items()}
        tiers = scheduler.tiers.load()
        log.warning(
            "streams waited for a step",
            extra={
                "step": plan.number,
                "gap_ms": round(1e3 * gap_s, 1),
                "usual_ms": round(1e3 * self._usual_s, 1),
                "step_ms": round(1e3 * step_s, 1),
                "decodes": plan.num_decodes,
                "prompt_tokens": plan.prompt_tokens,
                "preempted": len(scheduler.requests.preempted),
                "free_pages": scheduler.blocks.free,
                "evictable_pages": scheduler.blocks.evictable,
                "held_slots": tiers.held_slots if tiers else 0,
                **spent_ms,
            },
        )


def _together(steps: Iterable[_Ended]) -> dict[str, float]:
    """Time of each verb in all of these."""
    found: defaultdict[str, float] = defaultdict(float)
    for one in steps:
        for name, seconds in one.spent_s.items():
            found[name] += seconds
    return dict(found)


def _have_waited(before: StepPlan, plan: StepPlan) -> bool:
    """Whether a sequence decoded in both steps."""
    return not _rows(before).isdisjoint(_rows(plan))


def _rows(plan: StepPlan) -> set[tuple[int, int]]:
    count = plan.num_decodes
    slots, generations = plan.sample_slots[:count], plan.sample_generations[:count]
    return set(zip(slots.tolist(), generations.tolist(), strict=True))
