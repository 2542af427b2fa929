"""A group of a job: the choices that one attempt at a time runs.

Life: WAITING in the queue -> an attempt -> done, or, where the attempt failed, WAITING again.

A job begins as one group of all its choices, since they have the prompt in common. Once tokens were
sent the choices differ: after a failure each one that goes on becomes a group of its own, whose
prompt is followed by what was generated. To a worker that is a request of one choice, and what the
choices still have in common is found by its prefix cache.

Invariant: an open choice belongs to exactly one group.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from router.jobs import Demand, JobTimings
from router.routing import Failed

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from router.attempt import Attempt
    from router.faults import Fault
    from router.job_run import JobRun


class ChoiceGroup:
    """Some choices of one job, and how their attempts went. The dispatcher sets the fields."""

    def __init__(
        self, run: JobRun, choices: tuple[int, ...], former: ChoiceGroup | None = None
    ) -> None:
        """A group that waits.

        Args:
            run: the job.
            choices: their indices in the job.
            former: the group that these choices belonged to.
        """
        self.run = run
        self.choices = choices
        self.attempt: Attempt | None = None
        """The attempt under way."""
        self.attempts: int = former.attempts if former else 0
        """Attempts begun."""
        self.refusals: int = former.refusals if former else 0
        """Attempts that failed though no worker was lost that had it in hand."""
        self.failed: Failed = former.failed.copy() if former else Failed()
        self._timer: asyncio.TimerHandle | None = None
        self.in_grace = False
        """It waits though nobody could run it."""
        self.queue_span: Span | None = None
        """While it waits in the queue."""
        self.waits_since_ns: int = former.waits_since_ns if former else run.job.arrived_ns
        self.earlier: JobTimings = former.earlier if former else JobTimings()
        """Where the time of earlier attempts went."""
        self.demand = self._demand()
        """What workers have to make room for."""

    @property
    def model(self) -> str:
        """Which queue it waits in: jobs of one model compete with each other only."""
        return self.run.job.model.name

    @property
    def tokens(self) -> int:
        """What it weighs in the queue."""
        return self.demand.prompt_tokens

    @property
    def order(self) -> tuple[bool, int]:
        """Work that was begun before goes first, then the higher priority."""
        return self.attempts == 0, -self.run.job.priority

    @property
    def complete(self) -> bool:
        """Every choice of it has ended."""
        return all(self.run.choices[choice].ended for choice in self.choices)

    @property
    def generated(self) -> list[list[int]]:
        """Tokens of each choice that the client has: to be repeated, never sampled again."""
        if not self.run.started:
            return []
        return [list(self.run.choices[choice].token_ids) for choice in self.choices]

    @property
    def has_timer(self) -> bool:
        """Whether something is to happen to it after a while."""
        return self._timer is not None

    def set_timer(self, after_s: float, then: Callable[[ChoiceGroup], None]) -> None:
        """`then` is called with the group after so long, unless another timer is set meanwhile."""
        self.clear_timer()
        self._timer = asyncio.get_running_loop().call_later(after_s, then, self)

    def clear_timer(self) -> None:
        """Nothing is waited for any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end_attempt(self, fault: Fault) -> None:
        """The attempt failed; what follows is another, or the end."""
        if fault.of_hand_off and self.attempt is not None and (pair := self.attempt.pair):
            self.failed.pairs.add(pair)
        self.earlier, self.attempt = self.timings(), None
        self.refusals += fault.worker not in self.run.lost
        self.failed.workers.add(fault.worker)
        self.waits_since_ns = time.time_ns()
        self.demand = self._demand()

    def split(self) -> list[ChoiceGroup]:
        """The groups that go on after a failed attempt."""
        run = self.run
        if not run.started or len(self.choices) == 1:
            return [self]
        open_choices = [choice for choice in self.choices if not run.choices[choice].ended]
        groups = [ChoiceGroup(run, (choice,), self) for choice in open_choices]
        run.groups = [group for group in run.groups if group is not self] + groups
        return groups

    def timings(self) -> JobTimings:
        """Where the time went, over all attempts."""
        if self.attempt is None:
            return self.earlier
        return self.earlier + self.attempt.timings()

    def _demand(self) -> Demand:
        """Generated tokens count as prompt, since they are computed again behind it."""
        job, generated = self.run.job, self.generated
        done = len(generated[0]) if generated else 0
        return Demand(
            model=job.model,
            prompt_tokens=job.prompt_tokens + done,
            max_tokens=job.stopping.max_tokens - done,
            choices=len(self.choices),
            prompt_logprobs=job.prompt_logprobs,
        )
