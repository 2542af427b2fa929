"""Shares that wait for room at a worker: the dispatcher's queue, and how long each may stay in it.

Life of a wait: `begin` -> in the queue, for `queue_timeout_s` at most -> `end`, because a worker
has room or the job is over. Where nobody is left who could run the share, a job that has not begun
fails at once; one that has begun has a reader, who is worth a wait of `resume_grace_s` for a worker
to come. When one has come, the share gets another ordinary wait to find room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from router import errors
from router.queue import AdmissionQueue
from telemetry.names import Attr, SpanName
from telemetry.tracing import end_span, start_span

if TYPE_CHECKING:
    from router.job_run import JobRun
    from router.settings import RouterSettings
    from router.share import Share


def now_s() -> float:
    """The event loop's clock, which every time of the queue is on."""
    return asyncio.get_running_loop().time()


class WaitingShares:
    """The queue with a bound on every wait in it. Belongs to the event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        refusal: Callable[[Share], errors.RouterError | None],
        fail: Callable[[JobRun, errors.RouterError], None],
    ) -> None:
        """An empty queue.

        Args:
            settings: bounds of the queue and of the waits.
            refusal: why nobody could run a share even with room; None where somebody could.
            fail: ends a job, whose shares then wait no more.
        """
        self.queue: AdmissionQueue[Share] = AdmissionQueue(
            settings.max_queued_requests, settings.max_queued_tokens
        )
        self._settings = settings
        self._refusal = refusal
        self._fail = fail

    def check_deadline(self, share: Share) -> None:
        """Refuses a share whose deadline is over before what waits ahead of it has drained.

        Raises:
            RouterError: DEADLINE_UNREACHABLE.
        """
        left_s, wait_s = share.run.left_s, self.queue.wait_s(share.lane, now_s())
        if wait_s is not None and wait_s > left_s:
            raise errors.deadline_unreachable(wait_s, left_s, self._retry_after_s(share))

    def begin(self, share: Share, *, bounded: bool) -> None:
        """Queues a share. The queue is `bounded` for one that was just found fit to be run; the job
        of another has failed when this returns if nobody could run it.

        Raises:
            RouterError: QUEUE_FULL.
        """
        depth, tokens = self.queue.ahead(share.lane)
        ahead = {Attr.QUEUE_DEPTH: depth, Attr.QUEUE_TOKENS: tokens}
        self.queue.push(share, now_s(), bounded=bounded)
        share.queue_span = start_span(SpanName.QUEUE, share.run.job.context, ahead)
        share.set_timer(self._settings.queue_timeout_s, self._timed_out)
        if not bounded:
            self._check(share)

    def check(self) -> None:
        """Looks, after a worker was lost, who of those that wait could still be run."""
        for share in list(self.queue):
            self._check(share)

    def take(self, share: Share) -> float:
        """Ends the wait of a share that is dispatched now; returns how long it was, seconds."""
        waited_s = self.queue.take(share, now_s())
        self.end(share)
        return waited_s

    def end(self, share: Share, fault: str = "") -> None:
        """The share waits for nothing any more, if it did; a fault says why."""
        share.in_grace = False
        share.clear_timer()
        if share.queue_span is not None:
            self.queue.remove(share, now_s())
            end_span(share.queue_span, error=fault)
            share.queue_span = None

    def _check(self, share: Share) -> None:
        """Bounds the wait of a share that nobody can run now."""
        error = self._refusal(share)
        if error is None:
            return
        if not share.run.started:
            self._fail(share.run, error)
        elif not share.in_grace:
            share.in_grace = True
            share.set_timer(self._settings.resume_grace_s, self._grace_over)

    def _grace_over(self, share: Share) -> None:
        share.in_grace = False
        if self._refusal(share) is None:
            share.set_timer(self._settings.queue_timeout_s, self._timed_out)
        else:
            self._fail(share.run, errors.worker_lost_mid_stream(share.run.tokens_sent))

    def _timed_out(self, share: Share) -> None:
        run, timeout_s = share.run, self._settings.queue_timeout_s
        if run.started:
            self._fail(run, errors.worker_lost_mid_stream(run.tokens_sent))
        else:
            self._fail(run, errors.queue_timeout(timeout_s, self._retry_after_s(share)))

    def _retry_after_s(self, share: Share) -> float:
        return self.queue.retry_after_s(share.lane, now_s())
