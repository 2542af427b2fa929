"""A job between `Dispatcher.run` and its last event, and the events for its reader.

Life: its groups (`ChoiceGroup`) wait, run and are done -> OVER: finished, failed, or left by its
reader. The attempts stay hidden: the reader sees one start, tokens without gap or duplicate, and
one end.

Invariant: the reader gets nothing before `JobStarted`, and nothing after the last event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from baton.worker.v1 import worker_pb2
from router.dispatch.merge import ChoiceMerger
from router.dispatch.pace import Pace
from router.dispatch.stopping import end_of
from router.jobs import (
    ChoiceEnded,
    Demand,
    Job,
    JobEvent,
    JobFinished,
    JobPooled,
    JobStarted,
    JobTimings,
    JobTokens,
    TokenScore,
)
from router.placement.routing import Failed

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from router.dispatch.fault import Fault
    from router.workers.link import WorkerLink


class RunningAttempt(Protocol):
    """The part of an attempt that its group uses (`router.dispatch.attempt`)."""

    id: bytes
    is_computed: bool
    """Whether a worker has computed the prompt."""
    is_delivered: bool
    """Whether its KV has come to the decode worker."""

    @property
    def workers(self) -> list[WorkerLink]:
        """Workers of its legs."""
        ...

    @property
    def pair(self) -> tuple[WorkerLink, WorkerLink] | None:
        """The prefill and the decode worker, if there are two."""
        ...

    def timings(self) -> JobTimings:
        """Where the time went."""
        ...

    def report_rates(self) -> None:
        """It ended by itself."""
        ...

    def end(self, fault: str = "") -> None:
        """Ends the attempt at every worker."""
        ...


class JobRun:
    """One job, its choices, and the events that its reader cannot get yet."""

    def __init__(
        self, job: Job, send: Callable[[JobEvent], None], pace: Pace | None = None
    ) -> None:
        self.job = job
        self.pace = pace or Pace()
        """Pace of its model: hears of the work that is done."""
        # Counted on a steady clock: the other one may jump.
        began_s = job.began_s or time.monotonic()
        self._ends_s = began_s + (job.deadline_ns - job.arrived_ns) / 1e9
        self.choices = [ChoiceMerger(choice) for choice in range(job.choices)]
        self.started = False
        self.over = False
        self.groups = [ChoiceGroup(self, tuple(range(job.choices)))]
        self.lost: set[WorkerLink] = set()
        """Workers that were lost while they had the job in hand."""
        self._came_back: set[tuple[str, int]] = set()
        self._send = send
        self._ended = asyncio.Event()
        self._error: Exception | None = None
        self._held: list[JobEvent] = []
        """Events that wait for the start. None waits after it."""
        self._cached_prompt_tokens = 0
        self._loaded_prompt_tokens: Mapping[str, int] = {}
        self._prompt_logprobs: tuple[TokenScore, ...] | None = None

    @property
    def left_s(self) -> float:
        """Time to its deadline, seconds; negative after it."""
        return self._ends_s - time.monotonic()

    @property
    def tokens_sent(self) -> int:
        """Tokens sent so far, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices) if self.started else 0

    @property
    def complete(self) -> bool:
        """Every choice has ended."""
        return all(choice.ended for choice in self.choices)

    @property
    def workers_lost(self) -> int:
        """How many were lost with the job in hand. Those of one failure unit count once."""
        units = {one.identity.failure_unit or _start_of(one) for one in self.lost}
        return len(units)

    def came_back(self, worker: WorkerLink) -> None:
        """A worker was attached. If it is one that the job had lost, the job did not kill it. That
        counts once: it may be the job that makes it stand still."""
        back = {one for one in self.lost if _start_of(one) == _start_of(worker)}
        if back and _start_of(worker) not in self._came_back:
            self._came_back.add(_start_of(worker))
            self.lost -= back

    def group_of(self, choice: int) -> ChoiceGroup | None:
        """The group of an open choice."""
        return next((group for group in self.groups if choice in group.choices), None)

    def begin_attempt(self, group: ChoiceGroup) -> None:
        """Begins an attempt. Tokens that an earlier one left out of order are void.

        Before the start the choices begin anew. After it the sent tokens stay, and the attempt goes
        on behind them.
        """
        group.attempts += 1
        self._held.clear()
        if self.started:
            for choice in group.choices:
                self.choices[choice].forget_waiting()
        else:
            self.choices = [ChoiceMerger(choice.choice) for choice in self.choices]
            self._prompt_logprobs = None

    def end_by_tokens(self, group: ChoiceGroup) -> None:
        """Ends choices whose last token came but whose end was lost with a worker."""
        for index in group.choices if self.started else ():
            choice = self.choices[index]
            reason = end_of(choice.token_ids, self.job.stopping, self.job.model.eos_token_ids)
            if reason is not None:
                choice.forget_waiting()
                self.end_choice(ChoiceEnded(index, reason, len(choice.token_ids)))

    @property
    def owes_scores(self) -> bool:
        """Whether the prompt's log probabilities are wanted and have not come."""
        return self.job.prompt_logprobs and self._prompt_logprobs is None

    def first_known(self, cached_prompt_tokens: int, loaded: Mapping[str, int]) -> None:
        """The prefill worker has the first token. `loaded` is as in `JobFinished`."""
        self._cached_prompt_tokens = cached_prompt_tokens
        self._loaded_prompt_tokens = loaded

    def scored(self, prompt_logprobs: tuple[TokenScore, ...]) -> None:
        """The prompt's log probabilities came."""
        self._prompt_logprobs = prompt_logprobs
        self._pass_on(())

    def pooled(self, values: bytes) -> None:
        """The prompt was pooled, which ends its only choice."""
        end = ChoiceEnded(0, worker_pb2.END_REASON_LENGTH, 0)
        self._pass_on((JobPooled(values), *self.choices[0].end(end)))

    def prefill_over(self) -> None:
        """Nothing more comes from the prefill worker, so held events are sent."""
        self._prompt_logprobs = self._prompt_logprobs or ()
        self._pass_on(())

    def add(self, run: JobTokens) -> bool:
        """Takes tokens in any order; says whether their choice has ended."""
        if run.choice >= len(self.choices):
            return False
        self.pace.done(len(run.token_ids))
        choice = self.choices[run.choice]
        if self.started and choice.goes_on_with(run):  # The usual case.
            self._say(run)
        else:
            self._pass_on(choice.add(run))
        return choice.ended

    def end_choice(self, end: ChoiceEnded) -> None:
        """Takes a choice's end, which may overtake its tokens."""
        if end.choice < len(self.choices):
            self._pass_on(self.choices[end.choice].end(end))

    def finish(self, timings: JobTimings) -> None:
        """Sends the last event."""
        if not self.over and not self.started:
            self._start()
        self._say(JobFinished(timings, self._cached_prompt_tokens, self._loaded_prompt_tokens))
        self._end()

    def fail(self, error: Exception) -> None:
        """Ends the job with an error."""
        self._end(error)

    async def wait(self) -> None:
        """Returns after the last event.

        Raises:
            Exception: the error given to `fail`, or one that the reader raised.
        """
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def _pass_on(self, events: Sequence[JobEvent]) -> None:
        """Sends events. Holds them while the prompt's log probabilities must come first, and those
        of a search until its end: it is started again whole if a worker is lost."""
        if self.started:
            for event in events:
                self._say(event)
            return
        self._held += events
        is_whole = self.job.beams is None or self.complete
        if self._held and is_whole and not self.owes_scores:
            self._start()

    def _start(self) -> None:
        self.started = True
        self._say(JobStarted(self._cached_prompt_tokens, self._prompt_logprobs or ()))
        for event in self._held:
            self._say(event)
        self._held.clear()

    def _say(self, event: JobEvent) -> None:
        if self.over:
            return
        try:
            self._send(event)
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        if not self.over:
            self.over, self._error = True, error
            self._ended.set()


def _start_of(worker: WorkerLink) -> tuple[str, int]:
    return worker.identity.worker_id, worker.identity.epoch


class ChoiceGroup:
    """The choices of a job that one attempt at a time runs, and the record of their attempts.

    Life: WAITING in the queue -> an attempt -> done, or, if the attempt failed, WAITING again.

    A job begins as one group of all its choices, since they share the prompt. After the first
    tokens the choices differ. So after a failure each unfinished choice becomes a group of its own,
    with the generated tokens behind its prompt. For a worker that is a request of one choice. Its
    prefix cache finds the part that the choices still share.

    The dispatcher sets the fields. Invariant: an open choice belongs to exactly one group.
    """

    def __init__(
        self, run: JobRun, choices: tuple[int, ...], former: ChoiceGroup | None = None
    ) -> None:
        """A group that waits.

        Args:
            run: the job.
            choices: their indices in the job.
            former: the group to which these choices belonged.
        """
        self.run = run
        self.choices = choices
        self.attempt: RunningAttempt | None = None
        """The current attempt."""
        self.attempts: int = former.attempts if former else 0
        """Number of attempts begun."""
        self.refusals: int = former.refusals if former else 0
        """Number of attempts that failed without the loss of a worker."""
        self.failed: Failed = former.failed.copy() if former else Failed()
        self._timer: asyncio.TimerHandle | None = None
        self.has_waited = False
        """Whether it found no room when it came."""
        self.in_grace = False
        """Whether it waits although no worker could run it."""
        self.queue_span: Span | None = None
        """The span of its wait in the queue."""
        self.waits_since_ns: int = former.waits_since_ns if former else run.job.arrived_ns
        self.earlier: JobTimings = former.earlier if former else JobTimings()
        """The phases of earlier attempts."""
        self.demand = self._demand()
        """The demand of the group on workers."""

    @property
    def model(self) -> str:
        """The model, which names its queue. Only jobs of one model compete with each other."""
        return self.run.job.model.name

    @property
    def tenant(self) -> str:
        """Whose turn it takes in the queue: a tenant, or an address."""
        return self.run.job.line or self.run.job.tenant

    @property
    def call(self) -> str:
        """The call that it belongs to, or the connection."""
        return self.run.job.turn or self.run.job.id

    @property
    def priority(self) -> int:
        """As the client set it."""
        return self.run.job.priority

    @property
    def is_resumed(self) -> bool:
        """It was begun before."""
        return self.attempts > 0

    @property
    def complete(self) -> bool:
        """Whether all its choices have ended."""
        return all(self.run.choices[choice].ended for choice in self.choices)

    @property
    def generated(self) -> list[list[int]]:
        """Tokens of each choice that the client has. They are repeated and never sampled again."""
        if not self.run.started:
            return []
        return [list(self.run.choices[choice].token_ids) for choice in self.choices]

    @property
    def has_timer(self) -> bool:
        """Whether it has a timer."""
        return self._timer is not None

    def set_timer(self, after_s: float, then: Callable[[ChoiceGroup], None]) -> None:
        """Calls `then` with the group after `after_s` seconds, unless another timer is set
        meanwhile."""
        self.clear_timer()
        self._timer = asyncio.get_running_loop().call_later(after_s, then, self)

    def clear_timer(self) -> None:
        """Drops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end_attempt(self, fault: Fault) -> None:
        """The attempt failed. Another attempt or the end follows."""
        if fault.of_hand_off and self.attempt is not None and (pair := self.attempt.pair):
            self.failed.pairs.add(pair)
        self.earlier, self.attempt = self.timings(), None
        self.refusals += fault.reason is not None
        self.failed.workers.add(fault.worker)
        self.waits_since_ns = time.time_ns()
        self.demand = self._demand()

    def take_job(self) -> None:
        """The job is another one: its adapter was replaced before it began."""
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
        """Time in each phase, over all attempts."""
        if self.attempt is None:
            return self.earlier
        return self.earlier + self.attempt.timings()

    def _demand(self) -> Demand:
        """The demand now."""
        generated = self.generated
        done = len(generated[0]) if generated else 0
        return Demand.of(self.run.job, len(self.choices), done)
