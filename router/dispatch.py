"""The dispatcher: jobs in, events out, workers between.

Life of a job:

1. Admitted: refused at once where no worker could run it, or the queue is full.
2. Waiting, in the router's own queue, until a route has room: credit at a prefill worker, slots and
   pages at a decode worker. Whatever may make room (a load report, a worker, an end) pumps.
3. Running: one attempt at a time. An attempt that fails before the first token was sent is followed
   by another, `max_retries` times.
4. Over: finished, failed, or left by its reader; its attempt is ended at every worker involved.

Everything runs on the event loop, and every handler is synchronous: no state changes between two of
its lines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2
from router import errors, merge, routing
from router.attempt import Attempt
from router.events import NO_EVENTS, RouterEvents
from router.faults import Fault, error_of, refusal
from router.job_run import JobRun
from router.jobs import Job, JobEvent, JobFinished, ServedModel
from router.models import Models
from router.policies import POLICIES
from router.queue import AdmissionQueue
from telemetry.names import Attr, SpanName
from telemetry.tracing import end_span, start_span, write_span

if TYPE_CHECKING:
    from router.link import LinkState, Loss, WorkerLink
    from router.routing import Route
    from router.settings import RouterSettings

CLOSING_GRACE_S: Final = 0.05
"""A prefill worker's last word, with its timings, is waited for this long after the last token."""


class JobDispatcher:
    """`router.jobs.Dispatcher` over attached workers; also the `RegistryOwner`."""

    def __init__(self, settings: RouterSettings, events: RouterEvents = NO_EVENTS) -> None:
        self._settings = settings
        self._events = events
        self._policy = POLICIES[settings.policy]()
        self._workers: list[WorkerLink] = []
        self._models = Models(self._workers)
        self._queue: AdmissionQueue[JobRun] = AdmissionQueue(
            settings.max_queued_requests, settings.max_queued_tokens
        )
        self._runs: dict[Job, JobRun] = {}
        self._attempts: dict[bytes, Attempt] = {}
        self._pump_due = False
        self._draining = False
        self.membership_changed = asyncio.Event()
        """Set when a worker joins or leaves; cleared by whoever looks after that."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active_jobs(self) -> int:
        """Jobs waiting or running."""
        return len(self._runs)

    @property
    def active_attempts(self) -> int:
        """Attempts under way."""
        return len(self._attempts)

    @property
    def queued_jobs(self) -> int:
        """Jobs waiting for room."""
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of those."""
        return self._queue.tokens

    def queue_drain_s(self) -> dict[str, float]:
        """By model, how long what waits takes at the rate measured, where that is known."""
        return self._queue.waits_s(self._now_s())

    # What the front doors call.

    def models(self) -> Sequence[ServedModel]:
        """Models that could be run now, by name: not those that half of a pair is attached for."""
        return self._models.runnable()

    def attached_models(self) -> Sequence[ServedModel]:
        """Models that any worker is attached for, by name."""
        return self._models.attached()

    def model(self, name: str) -> ServedModel:
        """The model of that name; an empty one selects the only one that can be run.

        Raises:
            RouterError: NO_WORKERS, MODEL_LOADING or MODEL_NOT_FOUND.
        """
        return self._models.find(name, self._now_s())

    async def run(self, job: Job) -> AsyncGenerator[JobEvent, None]:
        """Runs a job; see `router.jobs.Dispatcher.run`."""
        run = self._runs[job] = JobRun(job)
        self._idle.clear()
        try:
            self._admit_or_reject(run)
            while not isinstance(event := await run.next_event(), JobFinished):
                yield event
            yield event
        finally:
            self._leave(run)

    def end_choice(self, job: Job, choice: int) -> None:
        """The choice needs no more tokens."""
        run = self._runs.get(job)
        if run is None or run.over or choice >= len(run.choices):
            return
        run.choices[choice].close()
        if run.complete:
            self._finish(run)

    # What the server calls when it ends.

    def drain(self) -> None:
        """Refuses new jobs from now on; those already here go on."""
        self._draining = True

    async def idle(self) -> None:
        """Returns when no job is left."""
        await self._idle.wait()

    def fail_all(self) -> None:
        """Ends every job with DRAINING."""
        for run in list(self._runs.values()):
            self._fail(run, errors.draining())

    # What the registry calls.

    def attached(self, link: WorkerLink) -> None:
        """A worker joins; it gets work with its first load report."""
        self._workers.append(link)
        self._workers.sort(key=lambda worker: worker.worker_id)
        self._models.joined(link)
        self.membership_changed.set()

    def loading(self, model: str) -> None:
        """A worker says that it loads a model."""
        self._models.loading(model, self._now_s())

    def loaded(self, _link: WorkerLink) -> None:
        """A worker may have room."""
        self._pump_soon()

    def received(self, link: WorkerLink, message: worker_pb2.WorkResponse) -> None:
        """Hands a message to its attempt; one for an attempt that is over is late, and dropped."""
        kind = message.WhichOneof("message")
        if kind == "tokens":
            for drawn_for, tokens in merge.step_tokens(message.tokens):
                if (attempt := self._attempts.get(drawn_for)) is not None:
                    attempt.tokens(link, tokens)
                    self._settle(attempt)
        elif kind is not None and kind != "attached":
            attempt_id: bytes = getattr(message, kind).attempt_id
            if (attempt := self._attempts.get(attempt_id)) is not None:
                attempt.receive(link, message)
                self._settle(attempt)
                self._pump_soon()

    def lost(self, link: WorkerLink, _loss: Loss, _was: LinkState) -> None:
        """A worker left: its attempts end, and so does the wait of jobs only it could run."""
        if link in self._workers:
            self._workers.remove(link)
            self._models.left(link, self._now_s())
        self.membership_changed.set()
        for attempt in list(self._attempts.values()):
            attempt.worker_lost(link)
        for run in list(self._queue):
            if (error := self._refusal(run)) is not None:
                self._fail(run, error)
        self._pump_soon()

    # Waiting.

    def _admit_or_reject(self, run: JobRun) -> None:
        try:
            self._admit(run)
        except errors.RouterError as error:
            self._events.rejected(error.reason)
            raise

    def _admit(self, run: JobRun) -> None:
        now_s = self._now_s()
        if self._draining:
            raise errors.draining()
        if (error := self._refusal(run)) is not None:
            raise error
        left_s = (run.job.deadline_ns - time.time_ns()) / 1e9
        wait_s = self._queue.wait_s(run.lane, now_s)
        if wait_s is not None and wait_s > left_s:
            retry_after_s = self._queue.retry_after_s(run.lane, now_s)
            raise errors.deadline_unreachable(wait_s, left_s, retry_after_s)
        self._enqueue(run, bounded=True)

    def _enqueue(self, run: JobRun, *, bounded: bool) -> None:
        depth, tokens = self._queue.ahead(run.lane)
        ahead = {Attr.QUEUE_DEPTH: depth, Attr.QUEUE_TOKENS: tokens}
        self._queue.push(run, self._now_s(), bounded=bounded)
        run.queue_span = start_span(SpanName.QUEUE, run.job.context, ahead)
        run.timer = asyncio.get_running_loop().call_later(
            self._settings.queue_timeout_s, self._wait_over, run
        )
        self._pump()

    def _wait_over(self, run: JobRun) -> None:
        retry_after_s = self._queue.retry_after_s(run.lane, self._now_s())
        self._fail(run, errors.queue_timeout(self._settings.queue_timeout_s, retry_after_s))

    def _pump_soon(self) -> None:
        """Pumps once after all that is being handled now."""
        if not self._pump_due and len(self._queue):
            self._pump_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Dispatches from the head of every lane for as long as there is room."""
        self._pump_due = False
        heads = self._queue.heads()
        while heads:
            heads = [run for run in heads if self._try_dispatch(run)]
            if heads:
                heads = self._queue.heads()

    def _try_dispatch(self, run: JobRun) -> bool:
        route = routing.choose(run.job, self._workers, self._policy, run.avoid)
        if route is None:
            return False
        self._events.waited(self._queue.take(run, self._now_s()))
        self._stop_waiting(run)
        self._dispatch(run, route)
        return True

    def _stop_waiting(self, run: JobRun, fault: str = "") -> None:
        self._queue.remove(run, self._now_s())
        if run.timer is not None:
            run.timer.cancel()
            run.timer = None
        if run.queue_span is not None:
            end_span(run.queue_span, error=fault)
            run.queue_span = None

    # Running.

    def _dispatch(self, run: JobRun, route: Route) -> None:
        chosen: dict[str, str | int] = {
            Attr.ROUTE_POLICY: self._policy.name,
            Attr.ROUTE_PREFILL: route.prefill.worker_id,
            Attr.ROUTE_DECODE: route.decode.worker_id if route.decode else "",
            Attr.ROUTE_ATTEMPT: run.attempts + 1,
        }
        now_ns = time.time_ns()
        write_span(SpanName.ROUTE, run.job.context, now_ns, now_ns, chosen)
        attempt = Attempt(run, route, self._attempt_failed)
        run.job.workers.extend(leg.worker.worker_id for leg in attempt.legs)
        self._attempts[attempt.id] = attempt
        run.begin_attempt(attempt)
        attempt.start(self._now_s())

    def _attempt_failed(self, attempt: Attempt, fault: Fault) -> None:
        run = attempt.run
        del self._attempts[attempt.id]
        run.attempt = None
        run.avoid.add(fault.worker)
        if run.over:
            return
        if run.complete:  # only its prefill worker's last word was still awaited
            run.finish(attempt.timings())
            self._release(run)
        elif self._may_retry(run, fault):
            self._events.retried(fault.name)
            self._enqueue(run, bounded=False)
        else:
            self._fail(run, error_of(run, fault))

    def _may_retry(self, run: JobRun, fault: Fault) -> bool:
        """Before the first token was sent, and where somebody is left to try."""
        return (
            not run.started
            and not fault.final
            and run.attempts <= self._settings.max_retries
            and self._refusal(run) is None
        )

    def _settle(self, attempt: Attempt) -> None:
        """Finishes the job once every choice has ended.

        The decode worker is let go at once (a first token may have ended them all). The prefill
        worker is about to say how long it took, if it has not yet; that is worth a short wait.
        """
        run = attempt.run
        if not run.complete or run.over or run.attempt is not attempt:
            return
        attempt.decode_enough()
        if not attempt.prefill_open:
            self._finish(run)
        elif run.timer is None:
            loop = asyncio.get_running_loop()
            run.timer = loop.call_later(CLOSING_GRACE_S, self._finish, run)

    # Over.

    def _finish(self, run: JobRun) -> None:
        if run.attempt is not None:
            run.finish(run.attempt.timings())
        self._release(run)

    def _fail(self, run: JobRun, error: errors.RouterError) -> None:
        if not run.attempts:
            self._events.rejected(error.reason)
        run.fail(error)
        self._release(run, error.reason)

    def _leave(self, run: JobRun) -> None:
        """The reader is done, for whatever reason."""
        run.over = True
        self._release(run, "cancelled")
        del self._runs[run.job]
        if not self._runs:
            self._idle.set()

    def _release(self, run: JobRun, fault: str = "") -> None:
        """Frees all that the job holds, wherever it is; what is free already stays so."""
        self._stop_waiting(run, fault)
        if run.attempt is not None:
            run.attempt.end(fault)
            del self._attempts[run.attempt.id]
            run.attempt = None
            self._pump_soon()

    def _refusal(self, run: JobRun) -> errors.RouterError | None:
        is_loading = self._models.is_loading(run.job.model.name, self._now_s())
        return refusal(run, self._workers, is_loading=is_loading)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
