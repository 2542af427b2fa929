"""Choice groups that wait for capacity: the dispatcher's queue and the limits of each wait.

Life of a wait: `begin` -> in the queue, for `queue_timeout_s` at most -> `end`, because a worker
has capacity or the job is over.

If no worker is left that could run the group, a job that has not begun fails at once. A job that
has begun has a reader, so it waits `resume_grace_s` for a worker to join. When one has joined, the
group gets another ordinary wait for capacity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from router import errors
from router.dispatch.queue import AdmissionQueue
from telemetry.names import Attr, SpanName
from telemetry.tracing import end_span, start_span

if TYPE_CHECKING:
    from router.dispatch.job_run import ChoiceGroup, JobRun
    from router.settings import RouterSettings


def now_s() -> float:
    """The event loop's clock. All times of the queue are by this clock."""
    return asyncio.get_running_loop().time()


class WaitingGroups:
    """The queue, with a limit on every wait. Belongs to the event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        refusal: Callable[[ChoiceGroup], errors.RouterError | None],
        fail: Callable[[JobRun, errors.RouterError], None],
    ) -> None:
        """An empty queue.

        Args:
            settings: bounds of the queue and of the waits.
            refusal: the error if no worker could run a group even with capacity; else None.
            fail: ends a job. Its groups wait no more after that.
        """
        self.queue: AdmissionQueue[ChoiceGroup] = AdmissionQueue(
            settings.max_queued_requests, settings.max_queued_tokens
        )
        self._settings = settings
        self._refusal = refusal
        self._fail = fail

    def check_deadline(self, group: ChoiceGroup) -> None:
        """Refuses a group whose deadline comes before the queue ahead of it has drained.

        Raises:
            RouterError: DEADLINE_UNREACHABLE.
        """
        left_s, wait_s = group.run.left_s, self.queue.wait_s(group.model, now_s())
        if wait_s is not None and wait_s > left_s:
            raise errors.deadline_unreachable(wait_s, left_s, self._retry_after_s(group))

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
        depth, tokens = self.queue.ahead(group.model)
        ahead = {Attr.QUEUE_DEPTH: depth, Attr.QUEUE_TOKENS: tokens}
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
        """Ends the wait of a group that is dispatched now; returns the time of the wait,
        seconds."""
        waited_s = self.queue.take(group, now_s())
        self.end(group)
        return waited_s

    def end(self, group: ChoiceGroup, fault: str = "") -> None:
        """Ends the wait of a group, if it waits. `fault` is the cause."""
        group.in_grace = False
        group.clear_timer()
        if group.queue_span is not None:
            self.queue.remove(group, now_s())
            end_span(group.queue_span, error=fault)
            group.queue_span = None

    def _check(self, group: ChoiceGroup) -> None:
        """Limits the wait of a group that no worker can run now."""
        error = self._refusal(group)
        if error is None:
            return
        if not group.run.started:
            self._fail(group.run, error)
        elif not group.in_grace:
            group.in_grace = True
            group.set_timer(self._settings.resume_grace_s, self._grace_over)

    def _grace_over(self, group: ChoiceGroup) -> None:
        group.in_grace = False
        if self._refusal(group) is None:
            group.set_timer(self._settings.queue_timeout_s, self._timed_out)
        else:
            self._fail(group.run, errors.worker_lost_mid_stream(group.run.tokens_sent))

    def _timed_out(self, group: ChoiceGroup) -> None:
        run, timeout_s = group.run, self._settings.queue_timeout_s
        if run.started:
            self._fail(run, errors.worker_lost_mid_stream(run.tokens_sent))
        else:
            self._fail(run, errors.queue_timeout(timeout_s, self._retry_after_s(group)))

    def _retry_after_s(self, group: ChoiceGroup) -> float:
        return self.queue.retry_after_s(group.model, now_s())
