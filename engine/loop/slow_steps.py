"""Logs when streams waited long for a token, and what the loop did in that time.

The time from one step's end to the next is divided among the loop's verbs. Two verbs lie within
others: `commands` within `receive` or `settle`, which else wait for the device; `tokens`, the work
that follows a step's end, within `settle`. A gap is long if it is several times as long as usual,
and at least `LEAST_S`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final

from engine.averages import averaged
from engine.schedule.scheduler import Scheduler
from engine.step.plan import StepPlan

log = logging.getLogger("baton.engine")

LEAST_S: Final = 0.1
"""No gap is long below, seconds."""
LONG: Final = 5.0
"""A gap is long after so many times the usual one."""

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
        self._before: StepPlan | None = None
        self._before_s = clock()

    def verb(self, name: str) -> AbstractContextManager[object]:
        """A range around a verb of the loop."""
        return _Timed(self._verb(name), name, self._spent)

    def settled(self, scheduler: Scheduler, plan: StepPlan, step_s: float) -> None:
        """A step has ended; it took `step_s` seconds on the device."""
        now_s, before = self._clock(), self._before
        gap_s, spent_s = now_s - self._before_s, self._spent.take()
        if before is not None and before.num_decodes and plan.num_decodes:
            is_long = self._usual_s and gap_s > max(LEAST_S, LONG * self._usual_s)
            if is_long and _have_waited(before, plan):
                self._report(scheduler, plan, (gap_s, step_s), spent_s)
            self._usual_s = averaged(self._usual_s, gap_s)
        self._before, self._before_s = plan, now_s

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


def _have_waited(before: StepPlan, plan: StepPlan) -> bool:
    """Whether a sequence decoded in both steps."""
    return not _rows(before).isdisjoint(_rows(plan))


def _rows(plan: StepPlan) -> set[tuple[int, int]]:
    count = plan.num_decodes
    slots, generations = plan.sample_slots[:count], plan.sample_generations[:count]
    return set(zip(slots.tolist(), generations.tolist(), strict=True))
