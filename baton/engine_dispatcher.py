"""Jobs on the engine of this process: what routers and workers are to a front door, without either.

Life of a job:

1. WAITING, until fewer jobs than the engine needs to see are in it.
2. RUNNING: submitted to the engine under a random id. What the engine tells of it becomes what a
   router would hear of its worker, by the same code on both sides.
3. OVER: its choices ended, it failed, or its reader left, which cancels it in the engine.

Jobs belong to the event loop; the engine has a thread of its own and tells through an inbox.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from baton.worker.v1 import worker_pb2
from baton.worker_outbox import LoopInbox
from baton.worker_wire import (
    end_reason_message,
    model_message,
    request_of,
    scores_message,
    tokens_message,
)
from engine.engine import Engine
from engine.types import (
    ChoiceEnded,
    Event,
    EventOfOne,
    FailureReason,
    Joined,
    NewTokens,
    PromptScored,
    RequestFailed,
    Sink,
    Started,
)
from router import errors, jobs, merge
from router.clocks import Clocks
from router.job_run import JobRun

AHEAD: Final = 2
"""Jobs in the engine for each of its slots: whatever ends, the next is there. More would only make
each of its steps look through them."""
_ID_BYTES: Final = 16


class _Running:
    """A job in the engine."""

    def __init__(self, run: JobRun, pool_tokens: int) -> None:
        self.id = secrets.token_bytes(_ID_BYTES)
        self.run = run
        self._pool_tokens = pool_tokens
        self._clocks = Clocks(run.job.arrived_ns)
        self._clocks.dispatched_ns = self._clocks.work.received_unix_ns = time.time_ns()

    def submit(self) -> worker_pb2.Submit:
        """What a router would send a worker that runs the job whole."""
        job = self.run.job
        return worker_pb2.Submit(
            attempt_id=self.id,
            mode=worker_pb2.WORK_MODE_WHOLE,
            prompt_ids=job.prompt_ids.astype("<u4").tobytes(),
            sampling=job.sampling,
            stopping=job.stopping,
            choices=job.choices,
            priority=job.priority,
            prompt_logprobs=job.prompt_logprobs,
        )

    def drew(self, tokens: jobs.JobTokens, at_ns: int) -> None:
        """A token of a step."""
        work = self._clocks.work
        work.ready_unix_ns = work.ready_unix_ns or at_ns
        work.last_token_unix_ns = at_ns
        self.run.add([tokens])

    def take(self, event: EventOfOne) -> None:
        """Anything else that the engine tells of it."""
        work = self._clocks.work
        match event:
            case Started():
                work.prefill_started_unix_ns = event.at_ns
                self.run.first_known(event.cached_tokens)
            case Joined():
                work.joined_unix_ns = event.at_ns
            case PromptScored():
                self.run.scored(merge.prompt_logprobs(scores_message(self.id, event.records)))
            case ChoiceEnded():
                reason = end_reason_message(event.reason)
                self.run.end_choice(jobs.ChoiceEnded(event.choice, reason, event.output_tokens))
                self.finish()
            case RequestFailed():
                self.run.fail(self._error(event.reason))

    def finish(self) -> None:
        """Tells the last event, if every choice has ended."""
        if self.run.complete and not self.run.over:
            self.run.finish(self._clocks.timings())

    def _error(self, reason: FailureReason) -> errors.RouterError:
        match reason:
            case FailureReason.NUMERICAL:
                return errors.numerical_error()
            case FailureReason.TOO_LARGE:
                prompt, output = self.run.job.prompt_tokens, self.run.job.stopping.max_tokens
                return errors.context_length_exceeded(
                    prompt, output, self._pool_tokens, "the KV pool"
                )
            case FailureReason.INTERNAL:
                return errors.internal()


class _Hearing:
    """What the engine says, on its way to the jobs. It does not know the engine: this one names it
    in arrays, which no garbage collection sees into, and neither would ever be freed."""

    def __init__(self) -> None:
        self.running: dict[bytes, _Running] = {}
        self.device_is_lost = False
        self._inbox = LoopInbox(asyncio.get_running_loop())

    def sink(self, events: Sequence[Event]) -> None:
        """On the step thread, as is `device_lost`."""
        self._inbox.call_on_loop(partial(self._take_events, events))

    def device_lost(self) -> None:
        """The device will run no further step."""
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
    """`router.jobs.Dispatcher` over an engine that is built. Belongs to the running event loop."""

    def __init__(self, engine: Engine, max_sequences: int) -> None:
        self._engine = engine
        self._model = jobs.ServedModel.of(model_message(engine.model))
        self._room = asyncio.Semaphore(AHEAD * max_sequences)
        self._hearing = _Hearing()
        self._sink: Sink = self._hearing.sink
        """One object: steps tell their sinks apart by comparing them."""

    def start(self) -> None:
        """Starts the engine."""
        self._engine.start(on_lost=self._hearing.device_lost)

    def models(self) -> Sequence[jobs.ServedModel]:
        """The engine's."""
        return [self._model]

    def model(self, name: str) -> jobs.ServedModel:
        """The engine's, if that is its name, or none is given.

        Raises:
            RouterError: MODEL_NOT_FOUND.
        """
        if name not in ("", self._model.name):
            raise errors.model_not_found(name, [self._model.name])
        return self._model

    def largest_pool_tokens(self, job: jobs.Job) -> int:
        """See `router.jobs.Dispatcher.largest_pool_tokens`."""
        shared = 2 * (job.choices - 1)  # Pages in which choices begin to differ.
        return (self._engine.load().total_pages - shared) * self._model.page_size_tokens

    async def run(self, job: jobs.Job, tell: Callable[[jobs.JobEvent], None]) -> None:
        """Runs a job; see `router.jobs.Dispatcher.run`."""
        async with self._room:
            if self._hearing.device_is_lost:
                raise errors.internal()
            running = _Running(JobRun(job, tell), self.largest_pool_tokens(job))
            self._hearing.running[running.id] = running
            try:
                self._engine.submit(request_of(running.submit()), self._sink)
                await running.run.wait()
            finally:
                self._leave(running)

    def end_choice(self, job: jobs.Job, choice: int) -> None:
        """The choice needs no more tokens. Called from within a handler, and done after it."""
        asyncio.get_running_loop().call_soon(self._end_choice, job, choice)

    def _end_choice(self, job: jobs.Job, choice: int) -> None:
        for running in self._hearing.running.values():
            if running.run.job is job:
                running.run.choices[choice].close()
                running.finish()

    def _leave(self, running: _Running) -> None:
        """The reader is done, for whatever reason; the engine may be, too."""
        running.run.over = True
        running.run.shares.clear()  # They name the run: a circle for the garbage collection.
        del self._hearing.running[running.id]
        self._engine.cancel(running.id)
