"""A job between `Dispatcher.run` and its last event: what its reader has been told.

Life: its shares (`router.share`) wait, run and are done -> OVER: finished, failed, or left by its
reader. What happens to the attempts stays hidden: the reader sees one start, tokens without gap or
duplicate, and one end.

Invariant: nothing is told before `JobStarted`, and nothing after the last event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from router.jobs import (
    ChoiceEnded,
    Job,
    JobEvent,
    JobFinished,
    JobStarted,
    JobTimings,
    JobTokens,
    TokenLogprobs,
)
from router.merge import ChoiceMerger
from router.share import Share
from router.stopping import end_of

if TYPE_CHECKING:
    from router.errors import RouterError
    from router.link import WorkerLink


class JobRun:
    """One job, its choices, and the events that its reader has not read yet."""

    def __init__(self, job: Job) -> None:
        self.job = job
        # Counted on a steady clock from here on: the other one may jump.
        self._ends_s = time.monotonic() + (job.deadline_ns - job.arrived_ns) / 1e9
        self.choices = [ChoiceMerger(choice) for choice in range(job.choices)]
        self.started = False
        self.over = False
        self.shares = [Share(self, tuple(range(job.choices)))]
        self.lost: set[WorkerLink] = set()
        """Workers that were lost while they had it in hand."""
        self._events: asyncio.Queue[JobEvent | RouterError] = asyncio.Queue()
        self._held: list[JobEvent] = []
        self._cached_prompt_tokens = 0
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def left_s(self) -> float:
        """Until its deadline; less than 0 where that is over."""
        return self._ends_s - time.monotonic()

    @property
    def tokens_sent(self) -> int:
        """Over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices) if self.started else 0

    @property
    def complete(self) -> bool:
        """Every choice has ended."""
        return all(choice.ended for choice in self.choices)

    def share_of(self, choice: int) -> Share | None:
        """The share that an open choice belongs to."""
        return next((share for share in self.shares if choice in share.choices), None)

    def begin_attempt(self, share: Share) -> None:
        """An attempt begins: what an earlier one left out of order is void.

        Before the start the choices begin anew; after it what was sent stays, and the attempt goes
        on behind it.
        """
        share.attempts += 1
        self._held.clear()
        if self.started:
            for choice in share.choices:
                self.choices[choice].forget_waiting()
        else:
            self.choices = [ChoiceMerger(choice.choice) for choice in self.choices]
            self._prompt_logprobs = None

    def end_by_tokens(self, share: Share) -> None:
        """Ends choices whose last token came and whose end was lost with a worker."""
        for index in share.choices if self.started else ():
            choice = self.choices[index]
            reason = end_of(choice.token_ids, self.job.stopping, self.job.model.eos_token_ids)
            if reason is not None:
                choice.forget_waiting()
                self.end_choice(ChoiceEnded(index, reason, len(choice.token_ids)))

    @property
    def owes_scores(self) -> bool:
        """The prompt's log probabilities are wanted, and have not come."""
        return self.job.prompt_logprobs and self._prompt_logprobs is None

    def first_known(self, cached_prompt_tokens: int) -> None:
        """The prefill side knows the first token."""
        self._cached_prompt_tokens = cached_prompt_tokens

    def scored(self, prompt_logprobs: tuple[TokenLogprobs, ...]) -> None:
        """The prefill side knows the prompt's log probabilities."""
        self._prompt_logprobs = prompt_logprobs
        self._tell(())

    def prefill_over(self) -> None:
        """Nothing more comes from the prefill side: nothing is waited for any more."""
        self._prompt_logprobs = self._prompt_logprobs or ()
        self._tell(())

    def add(self, runs: Iterable[JobTokens]) -> None:
        """Takes tokens in any order."""
        for run in runs:
            if run.choice < len(self.choices):
                self._tell(self.choices[run.choice].add(run))

    def end_choice(self, end: ChoiceEnded) -> None:
        """Takes a choice's end, which may overtake its tokens."""
        if end.choice < len(self.choices):
            self._tell(self.choices[end.choice].end(end))

    def finish(self, timings: JobTimings) -> None:
        """Tells the last event."""
        if not self.over:
            self._start()
            self.over = True
            self._events.put_nowait(JobFinished(timings))

    def fail(self, error: RouterError) -> None:
        """Tells the error."""
        if not self.over:
            self.over = True
            self._events.put_nowait(error)

    async def next_event(self) -> JobEvent:
        """What the reader is told next, as soon as there is something.

        Raises:
            RouterError: as given to `fail`.
        """
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def _tell(self, events: Sequence[JobEvent]) -> None:
        """Passes events on; holds them while the prompt's log probabilities are owed first."""
        self._held += events
        if self._held and not self.over and not self.owes_scores:
            self._start()

    def _start(self) -> None:
        if not self.started:
            self.started = True
            scores = self._prompt_logprobs or ()
            self._events.put_nowait(JobStarted(self._cached_prompt_tokens, scores))
        for event in self._held:
            self._events.put_nowait(event)
        self._held.clear()
