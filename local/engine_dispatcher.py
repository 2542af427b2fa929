"""Runs jobs on an engine in this process. To a front door it takes the place of router and workers.

Life of a job:

1. WAITING while the engine has enough jobs.
2. RUNNING: the job is submitted to the engine under a random id. The code of workers turns the
   engine's events into messages, and the code of routers reads these.
3. OVER: its choices ended, it failed, or its reader left. A reader that leaves cancels it in the
   engine.

Jobs belong to the event loop. The engine's own thread reaches them through an inbox.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from baton.worker.v1 import worker_pb2
from engine.engine import Engine
from engine.pooling.requests import Pooled
from engine.types import (
    Event,
    EventOfOne,
    FailureReason,
    Joined,
    NewTokens,
    PrefillStarted,
    PromptScored,
    RequestFailed,
    SequenceEnded,
    Sink,
)
from router import errors, jobs
from router.dispatch import merge
from router.dispatch.clocks import Clocks
from router.dispatch.job_run import JobRun
from router.dispatch.refusals import beams_refused, extension_refused
from router.placement.models import adapter_changes
from router.quotas import Quotas
from worker_base.messages import (
    end_reason_message,
    model_message,
    request_of,
    scores_message,
    tokens_message,
)
from worker_base.outbox import LoopInbox

AHEAD: Final = 2
"""Number of jobs in the engine for each of its slots: a freed slot is refilled at once. More jobs
would only slow down the scan in each step."""
_ID_BYTES: Final = 16
"""As those of attempts: drawn numbers never meet."""


class _Running:
    """A job in the engine."""

    def __init__(self, run: JobRun, pool_tokens: int, has: Callable[[bytes], bool]) -> None:
        """`has`: whether the engine has the adapter of a digest."""
        self.id = secrets.token_bytes(_ID_BYTES)
        self.run = run
        self._pool_tokens = pool_tokens
        self._has = has
        self._clocks = Clocks(run.job.arrived_ns)
        self._clocks.dispatched_ns = self._clocks.work.received_unix_ns = time.time_ns()

    def submit(self) -> worker_pb2.Submit:
        """Makes the message that a router would send to a worker that runs the whole job."""
        job = self.run.job
        return worker_pb2.Submit(
            attempt_id=self.id,
            mode=worker_pb2.WORK_MODE_POOL if job.pooling else worker_pb2.WORK_MODE_WHOLE,
            prompt_ids=job.prompt_ids.astype("<u4").tobytes(),
            sampling=job.sampling,
            stopping=job.stopping,
            choices=job.choices,
            priority=job.priority,
            prompt_logprobs=job.prompt_logprobs,
            adapter=job.model.digest,
            extensions=job.extensions,
            no_speculation=not job.speculates,
            beams=job.beams,
            pooling=job.pooling,
        )

    def drew(self, tokens: jobs.JobTokens, at_ns: int) -> None:
        """Takes tokens of one step."""
        work = self._clocks.work
        work.ready_unix_ns = work.ready_unix_ns or at_ns
        work.last_token_unix_ns = at_ns
        self.run.add(tokens)

    def take(self, event: EventOfOne) -> None:
        """Takes any other event of the job."""
        work = self._clocks.work
        match event:
            case PrefillStarted():
                work.prefill_started_unix_ns = event.at_ns
                self.run.first_known(event.cached_tokens, event.loaded_tokens)
            case Joined():
                work.joined_unix_ns = event.at_ns
            case PromptScored():
                self.run.scored(merge.prompt_logprobs(scores_message(self.id, event.records)))
            case Pooled():
                self.run.pooled(event.values.astype("<f4").tobytes())
                self.finish()
            case SequenceEnded():
                reason = end_reason_message(event.reason)
                drafts = event.drafted_tokens, event.accepted_tokens
                values = event.choice, reason, event.output_tokens, *drafts, event.score
                ended = jobs.ChoiceEnded(*values)
                self.run.end_choice(ended)
                self.finish()
            case RequestFailed():
                self.run.fail(self._error(event))

    def finish(self) -> None:
        """Ends the job if every choice has ended."""
        if self.run.complete and not self.run.over:
            self.run.finish(self._clocks.timings())

    def _error(self, event: RequestFailed) -> errors.RouterError:
        match event.reason:
            case FailureReason.NUMERICAL:
                return errors.numerical_error()
            case FailureReason.TOO_LARGE:
                prompt, output = self.run.job.prompt_tokens, self.run.job.stopping.max_tokens
                return errors.context_length_exceeded(
                    prompt, output, self._pool_tokens, "the KV pool"
                )
            case FailureReason.STRUCTURE:
                return errors.structure_too_complex(self.run.tokens_sent)
            case FailureReason.NO_TOKEN:
                return errors.no_token_left(self.run.tokens_sent)
            case FailureReason.HOOK:
                return errors.hook_failed(event.hook)
            case FailureReason.EXTENSION:
                return extension_refused(event.hook)
            case FailureReason.BEAMS:
                return beams_refused()
            case FailureReason.ADAPTER:
                model = self.run.job.model
                is_there = self._has(model.digest)  # But cannot be read now.
                return (adapter_changes if is_there else errors.model_not_found)(model.called)
            case FailureReason.INTERNAL:
                return errors.internal()


class _Hearing:
    """Passes the engine's events to the jobs.

    It holds no reference to the engine. The engine refers to it from arrays, which the garbage
    collector cannot look into: a cycle would never be freed.
    """

    def __init__(self) -> None:
        self.running: dict[bytes, _Running] = {}
        self.device_is_lost = False
        self._inbox = LoopInbox(asyncio.get_running_loop())

    def sink(self, events: Sequence[Event]) -> None:
        """Takes events. The step thread calls this and `device_lost`."""
        self._inbox.call_on_loop(partial(self._take_events, events))

    def device_lost(self) -> None:
        """Fails all jobs: the device will run no further step."""
        self._inbox.call_on_loop(self._fail_all)

    def _take_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, NewTokens):
                self._take_tokens(event)
            elif (running := self.running.get(event.request_id)) is not None:
                running.take(event)

    def _take_tokens(self, event: NewTokens) -> None:
        message = tokens_message(event, range(len(event.request_ids)))
        for job_id, tokens in merge.step_tokens(message):
            if (running := self.running.get(job_id)) is not None:
                running.drew(tokens, event.at_ns)

    def _fail_all(self) -> None:
        self.device_is_lost = True
        for running in self.running.values():
            running.run.fail(errors.internal())


class EngineDispatcher:
    """Implements `router.jobs.Dispatcher` with an engine. Belongs to the running event loop."""

    def __init__(self, engine: Engine, max_sequences: int) -> None:
        self._engine = engine
        served = jobs.ServedModel.of(model_message(engine.model))
        self._model = replace(served, prefix_cache=False)  # Nobody is chosen by who holds pages.
        self._room = asyncio.Semaphore(AHEAD * max_sequences)
        self.quotas = Quotas()
        self._hearing = _Hearing()
        self._sink: Sink = self._hearing.sink
        """Always the same object: steps compare sinks to tell them apart."""

    def start(self) -> None:
        """Starts the engine."""
        self._engine.start(on_lost=self._hearing.device_lost)

    def models(self) -> Sequence[jobs.ServedModel]:
        """The engine's model, and its adapters."""
        named = self._engine.adapters.named()
        own = [replace(self._model, adapter=one.name, digest=one.digest) for one in named]
        return [self._model, *own]

    def model(self, name: str) -> jobs.ServedModel:
        """Returns the engine's model if the name is its name or empty, or with the adapter of that
        name.

        Raises:
            RouterError: MODEL_NOT_FOUND.
        """
        if name in ("", self._model.name):
            return self._model
        models = {model.called: model for model in self.models()}
        if name not in models:
            raise errors.model_not_found(name, list(models))
        return models[name]

    def largest_pool_tokens(self, job: jobs.Job) -> int:
        """See `router.jobs.Dispatcher.largest_pool_tokens`."""
        return jobs.Demand.of(job).most_tokens(self._engine.load().total_pages)

    async def run(self, job: jobs.Job, send: Callable[[jobs.JobEvent], None]) -> None:
        """Runs a job; see `router.jobs.Dispatcher.run`."""
        async with self._room:
            if self._hearing.device_is_lost:
                raise errors.internal()
            most, has = self.largest_pool_tokens(job), self._engine.adapters.has
            running = _Running(JobRun(job, send), most, has)
            self._hearing.running[running.id] = running
            try:
                self._engine.submit(request_of(running.submit()), self._sink)
                await running.run.wait()
            finally:
                self._leave(running)

    def end_choice(self, job: jobs.Job, choice: int) -> None:
        """Ends a choice early. A handler calls this; the choice ends after the handler returns."""
        asyncio.get_running_loop().call_soon(self._end_choice, job, choice)

    def _end_choice(self, job: jobs.Job, choice: int) -> None:
        for running in self._hearing.running.values():
            if running.run.job is job:
                running.run.choices[choice].close()
                running.finish()

    def _leave(self, running: _Running) -> None:
        """Ends a job whose reader is done. The engine may be done, too."""
        running.run.over = True
        running.run.groups.clear()  # They refer to the run: this breaks the cycle.
        del self._hearing.running[running.id]
        self._engine.cancel(running.id)
