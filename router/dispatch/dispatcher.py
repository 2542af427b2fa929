"""The dispatcher takes jobs in, runs them on workers and sends events out.

Life of a job:

1. Admitted, or refused at once if no worker could run it or the queue is full.
2. Waiting (`router.dispatch.waiting`) until a route has capacity: credit at a prefill worker, slots
   and pages at a decode worker. Events that may give capacity (a load report, a new worker, the end
   of an attempt) trigger `_look`.
3. Running: its groups (`router.dispatch.job_run`), one attempt at a time each. Another attempt
   follows a failed one, before the first token was sent and after it. It carries the tokens already
   sent, and the stream continues behind them.
4. Over: finished, failed, or left by its reader. Its attempts are ended at every worker.

A job gets `max_retries` further attempts after refusals or errors. It also gets one after each lost
worker, but none after `max_workers_lost` of those that had it in hand, since it may kill them. A
worker that comes back with its epoch was not killed: it counts from the second time on.

Everything runs on the event loop, and every handler is synchronous, so no state changes between two
of its lines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2
from prefixes.keys import NO_KEYS
from router import errors
from router.dispatch import merge
from router.dispatch.attempt import Attempt
from router.dispatch.fault import Fault
from router.dispatch.job_run import JobRun
from router.dispatch.refusals import error_of, refusal
from router.dispatch.waiting import Pump, WaitingGroups, now_s
from router.events import NO_EVENTS, RouterEvents
from router.jobs import Demand, Job, JobEvent, ServedModel
from router.placement import routing
from router.placement.cost import Cost
from router.placement.forecasts import Found, compare
from router.placement.models import Models
from router.placement.placing import LocalReason
from router.quotas import Quotas
from telemetry.names import Attr, SpanName
from telemetry.tracing import write_span

if TYPE_CHECKING:
    from router.dispatch.job_run import ChoiceGroup
    from router.dispatch.queue import ModelQueue
    from router.placement.routing import Route
    from router.settings import RouterSettings
    from router.workers.link import LinkState, Loss, WorkerLink

CLOSING_GRACE_S: Final = 0.05
"""Longest wait after the last token for a prefill worker's timings, seconds."""


class JobDispatcher:
    """`router.jobs.Dispatcher` over attached workers; also the `RegistryOwner`."""

    def __init__(
        self,
        settings: RouterSettings,
        events: RouterEvents = NO_EVENTS,
        policy: Cost | None = None,
    ) -> None:
        """`policy` places; None: one that does not know what workers hold."""
        self._settings = settings
        self._events = events
        self._policy = policy or Cost()
        self._local = settings.local_prefill
        self._workers: list[WorkerLink] = []
        self._models = Models(self._workers, self._local)
        self._waiting = WaitingGroups(settings, self._refusal, self._models, self._fail)
        self._queue = self._waiting.queue
        self.quotas = Quotas()
        self._runs: dict[Job, JobRun] = {}
        self._attempts: dict[bytes, Attempt] = {}
        self._pump = Pump(self._look)
        self._draining = False
        self.membership_changed = asyncio.Event()
        """Set when a worker joins, leaves or changes. The task that waits for it clears it."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active_jobs(self) -> int:
        """Jobs waiting or running."""
        return len(self._runs)

    @property
    def active_attempts(self) -> int:
        """Attempts in progress."""
        return len(self._attempts)

    @property
    def queued_jobs(self) -> int:
        """Jobs waiting for capacity."""
        return len(self._queue)

    @property
    def waiting_jobs(self) -> int:
        """Jobs of which something waits: each counts once, however many of its choices wait."""
        return len({group.run for group in self._queue})

    def queued_by_model(self) -> dict[str, int]:
        """What waits for capacity, by the name of the model; those without are left out."""
        return self._queue.counts()

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the jobs that wait."""
        return self._queue.tokens

    def queue_drain_s(self) -> dict[str, float]:
        """Time to drain the queue, seconds, by model, for models with a measured rate."""
        return self._queue.waits_s(now_s())

    # Calls of the front doors.

    def models(self) -> Sequence[ServedModel]:
        """Models that could run now, by name, then adapters. What has workers for only one leg is
        left out."""
        return [*self._models.runnable(), *self._models.adapted()]

    def attached_models(self) -> Sequence[ServedModel]:
        """Models with any attached worker, by name."""
        return self._models.attached()

    def model(self, name: str) -> ServedModel:
        """The model of that name. An empty name selects the only model that can run.

        Raises:
            RouterError: NO_WORKERS, MODEL_LOADING or MODEL_NOT_FOUND.
        """
        return self._models.find(name, now_s())

    def largest_pool_tokens(self, job: Job) -> int | None:
        """See `router.jobs.Dispatcher.largest_pool_tokens`."""
        return routing.largest_pool_tokens(Demand.of(job), self._workers, self._local)

    async def run(self, job: Job, send: Callable[[JobEvent], None]) -> None:
        """Runs a job; see `router.jobs.Dispatcher.run`."""
        run = JobRun(job, send, self._queue.of(job.model.name).pace)
        with self._rejections():
            self.quotas.enter(job)
        self._runs[job] = run
        self._idle.clear()
        try:
            with self._rejections():
                self._admit(run.groups[0])
            await run.wait()
        finally:
            self.quotas.leave(job)
            self._leave(run)
            self._forget(job)

    def end_choice(self, job: Job, choice: int) -> None:
        """Ends a choice that needs no more tokens. Called in a handler, it acts after it."""
        asyncio.get_running_loop().call_soon(self._end_choice, job, choice)

    def _end_choice(self, job: Job, choice: int) -> None:
        run = self._runs.get(job)
        if run is None or run.over or choice >= len(run.choices):
            return
        run.choices[choice].close()
        if (group := run.group_of(choice)) is not None and group.complete:
            self._finish(group)

    # Calls of the server at its end.

    def drain(self) -> None:
        """Refuses new jobs from now on. Accepted jobs go on."""
        self._draining = True

    async def idle(self) -> None:
        """Returns when no job is left."""
        await self._idle.wait()

    def fail_all(self) -> None:
        """Ends every job with DRAINING."""
        for run in list(self._runs.values()):
            self._fail(run, errors.draining())

    # Calls of the registry.

    def attached(self, link: WorkerLink) -> None:
        """A worker joins. It gets work after its first load report."""
        for run in self._runs.values():
            run.came_back(link)
        self._workers.append(link)
        self._workers.sort(key=lambda worker: worker.worker_id)
        self._models.joined(link)
        self._events.worker_attached(link.role, link.identity.model.name)
        self.membership_changed.set()

    def loading(self, worker: worker_pb2.WorkerIdentity) -> None:
        """A worker loads its model."""
        self._models.loading(worker, now_s())

    def loaded(self, _link: WorkerLink) -> None:
        """A worker may have capacity."""
        if len(self._queue):
            self._pump.later()

    def received(self, link: WorkerLink, message: worker_pb2.WorkResponse) -> None:
        """Hands a message to its attempt. A message for an ended attempt is late and dropped."""
        kind = message.WhichOneof("message")
        if kind == "tokens":
            now_s, attempts = time.monotonic(), self._attempts
            for drawn_for, tokens in merge.step_tokens(message.tokens):
                attempt = attempts.get(drawn_for)
                if attempt is not None and attempt.tokens(link, tokens, now_s):
                    self._settle(attempt)
        elif kind is not None and kind != "attached":
            attempt_id: bytes = getattr(message, kind).attempt_id
            if (attempt := self._attempts.get(attempt_id)) is not None:
                if not attempt.receive(link, message):
                    return
                if kind == "taken_over":
                    self._events.prefilled_locally(LocalReason.CACHED)
                    self._policy.failed(attempt.group.demand, [attempt.route.prefill])
                if kind in ("taken_over", "delivered"):
                    self._policy.routed(attempt.group.demand, link)
                elif kind == "first_token":
                    self._compare(attempt, link, message.first_token.cached_prompt_tokens)
                self._settle(attempt)
                self._pump_soon()

    def role_changed(self, _link: WorkerLink) -> None:
        """What a worker takes changes; its legs go on, and what is known of its pages stays."""
        self._models.changed()
        self.membership_changed.set()
        self._waiting.check()
        self._pump_soon()

    def adapters_changed(self, link: WorkerLink) -> None:
        """Jobs that wait may have lost their adapter, or got it."""
        self._models.adapters_changed(link)
        self.membership_changed.set()
        self._waiting.check()
        self._pump_soon()

    def lost(self, link: WorkerLink, loss: Loss, _was: LinkState) -> None:
        """A worker left. Its attempts end, and so do the waits of jobs that only it could run."""
        if not link.left_in_order(loss):
            self._events.worker_lost(link.role, loss.name.lower())
        if link in self._workers:
            self._workers.remove(link)
            self._models.left(link, now_s(), loss)
        self.membership_changed.set()
        for attempt in list(self._attempts.values()):
            attempt.worker_lost(link)
        self._waiting.check()
        self._pump_soon()

    # Waiting.

    @contextmanager
    def _rejections(self) -> Iterator[None]:
        try:
            yield
        except errors.RouterError as error:
            self._events.rejected(error.reason)
            raise

    def _admit(self, group: ChoiceGroup) -> None:
        if (error := errors.draining() if self._draining else self._refusal(group)) is not None:
            raise error
        self._waiting.check_deadline(group)
        self._enqueue(group, bounded=True)
        self._waiting.check_stay(group)

    def _enqueue(self, group: ChoiceGroup, *, bounded: bool) -> None:
        self._waiting.begin(group, bounded=bounded)
        self._pump.now()

    def _pump_soon(self) -> None:
        """Looks at the queues once, after the current handlers."""
        if len(self._queue):
            self._pump.soon()

    def _look(self) -> None:
        """Dispatches from every queue for as long as there is room. Who would be late fails."""
        for queue in self._queue.queues():
            while any(self._try_dispatch(group) for group in self._next(queue)):
                pass

    def _next(self, queue: ModelQueue[ChoiceGroup]) -> Iterator[ChoiceGroup]:
        """Yields the group whose turn it is, then the first of a holder without a slot: the last
        slots are reserved for those."""
        if (group := queue.first()) is not None:
            yield group
            if self._holds_slots(group):
                other = queue.first(lambda one: not self._holds_slots(one))
                yield from () if other is None else (other,)

    def _holds_slots(self, group: ChoiceGroup) -> bool:
        holder = group.demand.holder
        return any(worker.estimate.held(holder) for worker in self._workers)

    def _try_dispatch(self, group: ChoiceGroup) -> bool:
        route = routing.choose(group.demand, self._workers, self._policy, group.failed, self._local)
        if route is None:
            return False
        if (error := self._waiting.too_late(group)) is None:
            self._events.waited(self._waiting.take(group))
            self._dispatch(group, route)
        else:
            self._fail(group.run, error)
        return True

    # Running.

    def _dispatch(self, group: ChoiceGroup, route: Route) -> None:
        chosen: dict[str, str | int] = {
            Attr.ROUTE_PREFILL: route.prefill.worker_id,
            Attr.ROUTE_DECODE: route.decode.worker_id if route.decode else "",
            Attr.ROUTE_ATTEMPT: group.attempts + 1,
        }
        if route.local_reason is not None:
            chosen[Attr.ROUTE_LOCAL_REASON] = route.local_reason
            self._events.prefilled_locally(route.local_reason)
        now_ns = time.time_ns()
        write_span(SpanName.ROUTE, group.run.job.context, now_ns, now_ns, chosen)
        attempt = Attempt(group, route, self._attempt_failed)
        self._policy.routed(group.demand, route.prefill)
        group.run.job.workers.extend(worker.worker_id for worker in attempt.workers)
        self._attempts[attempt.id] = group.attempt = attempt
        group.run.begin_attempt(group)
        attempt.start()

    def _compare(self, attempt: Attempt, worker: WorkerLink, cached_tokens: int) -> None:
        """Compares the first token of an attempt with its forecast, once."""
        if not attempt.is_compared:
            attempt.is_compared = True
            route, demand = attempt.route, attempt.group.demand
            found = Found(worker, attempt.age_s, cached_tokens, attempt.granted_pages)
            everyone = routing.everyone(demand, self._workers)
            compare(self._events, self._policy, demand, route, found, everyone)

    def _attempt_failed(self, attempt: Attempt, fault: Fault) -> None:
        group, run = attempt.group, attempt.run
        del self._attempts[attempt.id]
        self._policy.failed(group.demand, attempt.workers)
        group.end_attempt(fault)
        if run.over:
            return
        run.end_by_tokens(group)
        if group.complete:  # at most its prefill worker's last message was awaited
            self._finish(group)
        elif not self._may_go_on(group, fault):
            self._fail(run, error_of(group, fault, self._settings.debug.max_workers_lost))
        else:
            (self._events.failed_over if run.started else self._events.retried)(fault.name)
            for part in group.split():
                self._enqueue(part, bounded=False)

    def _may_go_on(self, group: ChoiceGroup, fault: Fault) -> bool:
        """Whether another attempt follows."""
        return (
            not fault.final
            and group.run.workers_lost < self._settings.debug.max_workers_lost
            and group.refusals <= self._settings.debug.max_retries
            and (group.run.started or self._waiting.may_come(group) or self._refusal(group) is None)
        )

    def _settle(self, attempt: Attempt) -> None:
        """Finishes the group once all its choices have ended.

        The decode worker is let go at once (a first token may have ended all choices). If the
        prefill worker has not reported its timings yet, they are worth a short wait.
        """
        group = attempt.group
        if not group.complete or group.run.over or group.attempt is not attempt:
            return
        attempt.decode_enough()
        if not attempt.prefill_open:
            self._finish(group)
        elif not group.has_timer:
            group.set_timer(CLOSING_GRACE_S, self._finish)

    # Over.

    def _finish(self, group: ChoiceGroup) -> None:
        """Ends a group whose choices have all ended. The last group ends the job."""
        timings = group.timings()
        self._release(group)
        if group.run.complete:
            group.run.finish(timings)

    def _fail(self, run: JobRun, error: errors.RouterError) -> None:
        if not any(group.attempts for group in run.groups):
            self._events.rejected(error.reason)
        run.fail(error)
        for group in run.groups:
            self._release(group, error.reason)

    def _leave(self, run: JobRun) -> None:
        """The reader is done, for any reason."""
        run.over = True
        for group in run.groups:
            self._release(group, "cancelled")
        run.groups.clear()  # They refer to the run, and only a garbage collection frees a cycle.

    def _forget(self, job: Job) -> None:
        del self._runs[job]
        if not self._runs:
            self._idle.set()

    def _release(self, group: ChoiceGroup, fault: str = "") -> None:
        """Frees everything that the group holds, at any worker. A second call does nothing."""
        self._waiting.end(group, fault)
        if (attempt := group.attempt) is not None:
            attempt.report_rates()
            attempt.end(fault)
            if not (attempt.is_computed or attempt.is_delivered):
                self._policy.failed(group.demand, attempt.workers)
            del self._attempts[attempt.id]
            group.attempt = None
            self._pump_soon()

    def _refusal(self, group: ChoiceGroup) -> errors.RouterError | None:
        self._follow_adapter(group)
        is_loading = self._models.is_loading(group.model, now_s())
        return refusal(group, self._workers, self._local, is_loading=is_loading)

    def _follow_adapter(self, group: ChoiceGroup) -> None:
        """A group that waits, of a job that has not begun, takes what its adapter's name means now,
        if what it meant cannot run any more. The new content has no pages that could be found."""
        run = group.run
        if not run.started and (model := self._models.follows(run.job.model)) is not None:
            run.job = replace(run.job, model=model, keys=NO_KEYS)
            group.take_job()
