"""Where the time of a case goes, by the steps of each worker that runs it.

A step is *asked* for when the loop launches it, has *begun* when its turn has come (in an expert
group the others have asked, too; elsewhere at once), is *launched* when the host has queued all of
it, and has *ended* when its device says so. From the end of the step before to the beginning of
the next one, the device has nothing from this worker.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from engine.engine import Engine
from engine.step.executor import Launched
from engine.step.plan import StepPlan


@dataclass
class Step:
    """A step with tokens of this worker. Times are seconds of `time.monotonic`, which all processes
    of a host share."""

    prompt_tokens: int
    rows: int
    """Rows that decode."""
    asked_s: float
    begun_s: float = 0.0
    launched_s: float = 0.0
    ended_s: float = 0.0
    workers: int = 1
    """Workers of its group that have tokens in it."""


class StepRecords:
    """Steps of an engine since they were last taken. It launches them in its executor's
    place."""

    def __init__(self, engine: Engine) -> None:
        """`engine` has no step in flight."""
        self._steps: list[Step] = []
        self._not_begun: deque[Step] = deque()
        loop: Any = engine._loop
        self._launch: Callable[[StepPlan], Launched] = loop._executor.launch
        loop._executor.launch = self.launch
        member: Any = getattr(getattr(engine.ranks, "dispatch", None), "member", None)
        self._has_turns = member is not None
        if self._has_turns:
            self._take, member.take = member.take, self.take

    def launch(self, plan: StepPlan) -> Launched:
        """See `Executor`."""
        if not plan.num_tokens:
            return self._launch(plan)
        asked_s = time.monotonic()
        step = Step(plan.prompt_tokens, plan.num_decodes, asked_s, asked_s)
        self._steps.append(step)
        if self._has_turns:
            self._not_begun.append(step)
        launched = self._launch(plan)
        step.launched_s = time.monotonic()
        launched.add_done_callback(partial(_end, step))
        return launched

    def take(self, ask: list[int]) -> Any:
        """See `Turns`. On a CPU a step asks for its turn once the one before has ended."""
        step = self._not_begun.popleft()
        asks = self._take(ask)
        step.begun_s, step.workers = time.monotonic(), len(asks)
        return asks

    def taken(self) -> list[dict[str, Any]]:
        """All steps that have ended, as JSON has them. None is in flight now."""
        steps, self._steps = self._steps, []
        return [asdict(step) for step in steps if step.ended_s]


def _end(step: Step, _: Launched) -> None:
    step.ended_s = time.monotonic()


@dataclass
class Spent:
    """Where the time of a case has gone at a worker, seconds. The first five are all of it."""

    before_s: float
    """Until its first step was asked for."""
    steps_s: float
    """Its device had a step of its own."""
    turns_s: float
    """It had none, and one waited for its turn."""
    between_s: float
    """It had none, and none was asked for."""
    after_s: float
    """Since its last step has ended."""
    launching_s: float
    """Its host queued steps, most of it meanwhile."""
    steps: int
    alone: int
    """Steps in which no other worker of its group had tokens."""
    step_p50_ms: float
    """From the end of a step to that of the next."""

    def line(self) -> str:
        """For people."""
        parts = self.before_s, self.steps_s, self.turns_s, self.between_s, self.after_s
        whole_s = sum(parts)
        before, steps, turns, between, after = (f"{part / whole_s:.1%}" for part in parts)
        return (
            f"{self.steps} steps ({self.alone} alone) of {self.step_p50_ms:.1f} ms (p50):"
            f" {steps} of {whole_s:.3f} s in steps, {turns} waiting for turns, {between} between,"
            f" {before} before the first, {after} after the last; the host launches for"
            f" {self.launching_s / whole_s:.1%}"
        )


def spent(given: Iterable[dict[str, Any]], began_s: float, over_s: float) -> Spent | None:
    """Time of a case that began and was over at these times; None: the worker had no step."""
    steps: Sequence[Step] = [Step(**one) for one in given]
    if not steps:
        return None
    free_s, in_steps_s, turns_s, between_s = steps[0].asked_s, 0.0, 0.0, 0.0
    for step in steps:
        idle_s = max(0.0, step.begun_s - free_s)
        turn_s = min(idle_s, step.begun_s - step.asked_s)
        turns_s += turn_s
        between_s += idle_s - turn_s
        in_steps_s += step.ended_s - max(free_s, step.begun_s)
        free_s = step.ended_s
    gaps = [then.ended_s - before.ended_s for before, then in pairwise(steps)]
    return Spent(
        before_s=steps[0].asked_s - began_s,
        steps_s=in_steps_s,
        turns_s=turns_s,
        between_s=between_s,
        after_s=over_s - free_s,
        launching_s=sum(max(0.0, step.launched_s - step.begun_s) for step in steps),
        steps=len(steps),
        alone=sum(step.workers == 1 for step in steps),
        step_p50_ms=1e3 * statistics.median(gaps or [in_steps_s]),
    )
