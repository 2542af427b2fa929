"""Groups that wait for room at a worker: the dispatcher's queue, and how long each may stay in it.

Life of a wait: `begin` -> in the queue, for `queue_timeout_s` at most -> `end`, because a worker
has room or the job is over.

It may happen that no worker is left that could run a group. A job that has not begun fails at once,
unless a worker stood still: then it waits for that one to wake, for `WAKES_S`. So it does while its
adapter is replaced, worker by worker. One that has begun has a reader. It waits for a worker for
`resume_grace_s`, if one is expected: a worker of the model was lost without a word not longer ago
than that, or loads now. If none is expected it fails at once, too. When a worker has come, the
group gets another ordinary wait to find room.

Deadlines: while anything waits, a job is refused that is not likely to be done in time
(`router.dispatch.pace`). It is asked again when its turn comes, beside all that run then. So
workers spend no time on answers that come too late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from router import errors
from router.dispatch.queue import AdmissionQueue
from telemetry.names import Attr, SpanName
from telemetry.tracing import end_span, start_span

if TYPE_CHECKING:
    from router.dispatch.job_run import ChoiceGroup, JobRun
    from router.placement.models import Models
    from router.settings import RouterSettings

WAKES_S: Final = 10.0
"""Time in which a worker that stood still is waited for, seconds. Most that wake do so sooner."""
REST_S: Final = 5e-3
"""Time between a look and the next one for a load report. A thousand workers report every 0.1 ms,
and a look at a queue whose head fits nowhere takes half a millisecond among so many."""


def now_s() -> float:
    """The event loop's clock. All times of the queue are by this clock."""
    return asyncio.get_running_loop().time()


class WaitingGroups:
    """The queue, with a limit on every wait. Belongs to the event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        refusal: Callable[[ChoiceGroup], errors.RouterError | None],
        models: Models,
        fail: Callable[[JobRun, errors.RouterError], None],
    ) -> None:
        """An empty queue.

        Args:
            settings: bounds of the queue and of the waits.
            refusal: why nobody could run a group even with room; None where somebody could.
            models: knows whether a worker is likely to come.
            fail: ends a job, whose groups then wait no more.
        """
        self.queue: AdmissionQueue[ChoiceGroup] = AdmissionQueue(
            settings.max_queued_requests, settings.debug.max_queued_tokens
        )
        self._settings = settings
        self._refusal = refusal
        self._models = models
        self._fail = fail

    def check_deadline(self, group: ChoiceGroup) -> None:
        """Refuses a group that is not likely to be done by its deadline. Where nothing waits none
        is: it takes nobody's place.

        Raises:
            RouterError: DEADLINE_UNREACHABLE.
        """
        queue = self.queue.of(group.model)
        wait_s = queue.wait_of_s(group, now_s()) if len(queue) else None
        if wait_s is not None and (error := self._unreachable(group, wait_s)) is not None:
            raise error

    def check_stay(self, group: ChoiceGroup) -> None:
        """Refuses a group that still waits as it came, and has less time than its service takes.

        Raises:
            RouterError: DEADLINE_UNREACHABLE.
        """
        group.has_waited = group.queue_span is not None
        if group.has_waited and (error := self._unreachable(group, 0.0)) is not None:
            raise error

    def too_late(self, group: ChoiceGroup) -> errors.RouterError | None:
        """Why a group gets no room now that its turn has come: beside all that run it would be
        late. One that was begun before goes on. One that found room at once is refused only if
        the load is the cause: else it may try."""
        pace = self.queue.of(group.model).pace
        service_s = pace.surely_s(group.demand, pace.running + 1)
        left_s = group.run.left_s
        if service_s <= left_s or group.is_resumed:
            return None
        if not group.has_waited and not pace.is_late_by_load(group.demand, left_s):
            return None
        return self._late(group, service_s)

    def _unreachable(self, group: ChoiceGroup, wait_s: float) -> errors.RouterError | None:
        needed_s = self.queue.of(group.model).pace.needed_s(group.demand, wait_s)
        return self._late(group, needed_s) if needed_s > group.run.left_s else None

    def _late(self, group: ChoiceGroup, needed_s: float) -> errors.RouterError:
        left_s = max(0.0, group.run.left_s)
        return errors.deadline_unreachable(needed_s, left_s, self._retry_after_s(group))

    def begin(self, group: ChoiceGroup, *, bounded: bool) -> None:
        """Queues a group.

        Args:
            group: the group.
            bounded: True for a new group that some worker could run; the bounds of the queue then
                hold. For any other group its job may have failed when this returns, because no
                worker could run it.

        Raises:
            RouterError: QUEUE_FULL.
        """
        queue = self.queue.of(group.model)
        ahead = {Attr.QUEUE_DEPTH: len(queue), Attr.QUEUE_TOKENS: queue.tokens}
        self.queue.push(group, now_s(), bounded=bounded)
        group.queue_span = start_span(SpanName.QUEUE, group.run.job.context, ahead)
        group.set_timer(self._settings.queue_timeout_s, self._timed_out)
        if not bounded:
            self._check(group)

    def check(self) -> None:
        """Checks after the loss of a worker which waiting groups could still run."""
        for group in list(self.queue):
            self._check(group)

    def take(self, group: ChoiceGroup) -> float:
        """Ends the wait of a group that is dispatched now; returns how long it was, seconds."""
        waited_s = self.queue.of(group.model).take(group, now_s())
        self.end(group)
        return waited_s

    def end(self, group: ChoiceGroup, fault: str = "") -> None:
        """Ends the wait of a group, if it waits. `fault` is the cause."""
        group.in_grace = False
        group.clear_timer()
        if group.queue_span is not None:
            self.queue.of(group.model).remove(group, now_s())
            end_span(group.queue_span, error=fault)
            group.queue_span = None

    def _check(self, group: ChoiceGroup) -> None:
        """Limits the wait of a group that no worker can run now."""
        error = self._refusal(group)
        if error is None:
            return
        run = group.run
        if not run.started and not self.may_come(group):
            self._fail(run, error)
        elif run.started and not self._is_expected(group):
            self._fail(run, self._lost(run))
        elif not group.in_grace:
            group.in_grace = True
            grace_s = self._settings.debug.resume_grace_s if run.started else WAKES_S
            group.set_timer(grace_s, self._grace_over)

    def may_come(self, group: ChoiceGroup) -> bool:
        """Whether a worker that could run a group stood still a moment ago, or its adapter is
        being replaced."""
        is_changing = self._models.is_changing(group.run.job.model)
        return is_changing or self._models.may_wake(group.model, now_s(), WAKES_S)

    def _is_expected(self, group: ChoiceGroup) -> bool:
        return self._models.is_expected_back(
            group.model, now_s(), self._settings.debug.resume_grace_s
        )

    def _grace_over(self, group: ChoiceGroup) -> None:
        group.in_grace = False
        error = self._refusal(group)
        if error is None:
            group.set_timer(self._settings.queue_timeout_s, self._timed_out)
        elif not group.run.started:
            self._fail(group.run, error)
        else:
            self._fail(group.run, self._lost(group.run))

    def _timed_out(self, group: ChoiceGroup) -> None:
        run, timeout_s = group.run, self._settings.queue_timeout_s
        if run.started:
            self._fail(run, self._lost(run))
        else:
            self._fail(run, errors.queue_timeout(timeout_s, self._retry_after_s(group)))

    def _lost(self, run: JobRun) -> errors.RouterError:
        lacks_adapter = self._models.lacks_adapter(run.job.model)
        return errors.worker_lost_mid_stream(run.tokens_sent, lacks_adapter=lacks_adapter)

    def _retry_after_s(self, group: ChoiceGroup) -> float:
        return self.queue.retry_after_s(group.model, now_s())


class Pump:
    """When the queue is looked at: soon after what may give capacity, and rarely for load reports.
    `look` is called in handlers of their own. Belongs to the event loop."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._soon = False
        self._later: asyncio.TimerHandle | None = None
        self._looked_s = 0.0

    def soon(self) -> None:
        """Looks once, after the current handlers."""
        if not self._soon:
            self._soon = True
            asyncio.get_running_loop().call_soon(self.now)

    def later(self) -> None:
        """Looks once, soon or when the last look was `REST_S` ago."""
        if self._soon or self._later is not None:
            return
        loop = asyncio.get_running_loop()
        if (rest_s := self._looked_s + REST_S - loop.time()) > 0:
            self._later = loop.call_later(rest_s, self.now)
        else:
            self.soon()

    def now(self) -> None:
        """Looks."""
        self._soon = False
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._look()
        self._looked_s = asyncio.get_running_loop().time()
