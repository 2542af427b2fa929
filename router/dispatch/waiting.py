"""Shares that wait for room at a worker: the dispatcher's queue, and how long each may stay in it.

Life of a wait: `begin` -> in the queue, for `queue_timeout_s` at most -> `end`, because a worker
has room or the job is over. Where nobody is left who could run the group, a job that has not begun
fails at once; one that has begun has a reader, who is worth a wait of `resume_grace_s` for a worker
to come. When one has come, the group gets another ordinary wait to find room.
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
    """The event loop's clock, which every time of the queue is on."""
    return asyncio.get_running_loop().time()


class WaitingGroups:
    """The queue with a bound on every wait in it. Belongs to the event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        refusal: Callable[[ChoiceGroup], errors.RouterError | None],
        fail: Callable[[JobRun, errors.RouterError], None],
    ) -> None:
        """An empty queue.

        Args:
            settings: bounds of the queue and of the waits.
            refusal: why nobody could run a group even with room; None where somebody could.
            fail: ends a job, whose groups then wait no more.
        """
        self.queue: AdmissionQueue[ChoiceGroup] = AdmissionQueue(
            settings.max_queued_requests, settings.max_queued_tokens
        )
        self._settings = settings
        self._refusal = refusal
        self._fail = fail

    def check_deadline(self, group: ChoiceGroup) -> None:
        """Refuses a group whose deadline is over before what waits ahead of it has drained.

        Raises:
            RouterError: DEADLINE_UNREACHABLE.
        """
        left_s, wait_s = group.run.left_s, self.queue.wait_s(group.model, now_s())
        if wait_s is not None and wait_s > left_s:
            raise errors.deadline_unreachable(wait_s, left_s, self._retry_after_s(group))

    def begin(self, group: ChoiceGroup, *, bounded: bool) -> None:
        """Queues a group. The queue is `bounded` for one that was just found fit to be run; the job
        of another has failed when this returns if nobody could run it.

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
        """Looks, after a worker was lost, who of those that wait could still be run."""
        for group in list(self.queue):
            self._check(group)

    def take(self, group: ChoiceGroup) -> float:
        """Ends the wait of a group that is dispatched now; returns how long it was, seconds."""
        waited_s = self.queue.take(group, now_s())
        self.end(group)
        return waited_s

    def end(self, group: ChoiceGroup, fault: str = "") -> None:
        """The group waits for nothing any more, if it did; a fault says why."""
        group.in_grace = False
        group.clear_timer()
        if group.queue_span is not None:
            self.queue.remove(group, now_s())
            end_span(group.queue_span, error=fault)
            group.queue_span = None

    def _check(self, group: ChoiceGroup) -> None:
        """Bounds the wait of a group that nobody can run now."""
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
