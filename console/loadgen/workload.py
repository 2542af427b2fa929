"""Plans the requests of a run and their times, before anything is sent.

Each prompt is drawn from the run's seed and the request's number. So prompts share only the
prefixes that a trace names, and any process can write any request. The same seed gives the same
prompts: a second run with it may find them in prefix caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from console.loadgen.errors import WrongUseError
from console.loadgen.trace_files import BLOCK_TOKENS, TraceRow

FIRST_ID: Final = 10
"""Smallest token id that is drawn: lower ids are often special."""
DEFAULT_NUM: Final = 100
_ARRIVALS, _PROMPTS, _BLOCKS, WARM_UPS, _SYSTEM = range(5)
"""Independent streams of random numbers from one seed."""


class Planned(NamedTuple):
    """One planned request."""

    number: int
    """Number of the request, in the order of due times."""
    due_s: float
    """Due time, seconds after the start of the run."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """See `TraceRow.blocks`."""
    turn: Turn | None = None
    """Its place in a conversation. `prompt_tokens` are then those that the turn adds."""


class Turn(NamedTuple):
    """The place of a request in a conversation."""

    conversation: int
    number: int
    """From 0. The first turn of a conversation is due at `due_s`."""
    think_s: float
    """Seconds between the end of the answer before and this turn; 0 at the first."""
    system_tokens: int
    """Leading tokens that all conversations of the run share; 0 after the first turn."""


class LoadPlan(NamedTuple):
    """All requests of one run, in the order of due times."""

    requests: tuple[Planned, ...]
    seed: int
    in_turn: bool = False
    """Whether each request waits for the end of the one before; `due_s` is then unused."""
    conversations: int = 0
    """The number of conversations. 0: the requests are independent."""

    def share(self, number: int, senders: int) -> tuple[Planned, ...]:
        """The requests of one sender. A conversation has one sender."""
        if not self.conversations:
            return self.requests[number::senders]
        return tuple(
            one for one in self.requests if one.turn and one.turn.conversation % senders == number
        )

    @property
    def most_senders(self) -> int:
        """The number of senders that have something to send."""
        return 1 if self.in_turn else self.conversations or len(self.requests)

    def longest_s(self, timeout_s: float) -> float:
        """The longest time that the run may take, if no request takes longer than `timeout_s`."""
        if self.in_turn:
            return timeout_s * len(self.requests)
        last_s = self.requests[-1].due_s
        if not self.conversations:
            return last_s + timeout_s
        turns = [0.0] * self.conversations
        for one in self.requests:
            if one.turn:
                turns[one.turn.conversation] += one.turn.think_s + timeout_s
        return max(one.due_s for one in self.requests) + max(turns)

    @property
    def rate(self) -> float:
        """Mean requests a second; 0 in turn or for a single request."""
        last_s = max(one.due_s for one in self.requests)
        return 0.0 if self.in_turn or last_s <= 0 else len(self.requests) / last_s


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths and arrivals of requests."""

    num: int
    """Number of requests in a run. 0: all requests of the trace that fit."""
    prompt_tokens: int = 1024
    output_tokens: int = 128
    trace: tuple[TraceRow, ...] = ()
    """Source of lengths and shared prefixes. Empty: all requests have the lengths above."""
    trace_arrivals: bool = False
    """Whether requests come at the trace's times. Otherwise arrivals are a Poisson process, and
    lengths are consecutive rows of the trace from a random row on."""
    duration_s: float = 0.0
    """Requests due later are left out. 0: no request is."""

    def __post_init__(self) -> None:
        if self.trace and self.num > len(self.trace):
            raise WrongUseError(
                f"the trace has {len(self.trace):,} requests that fit, not {self.num}"
            )
        if self.trace_arrivals and not self.trace:
            raise WrongUseError("only a trace has arrivals of its own: --trace")
        if not self.trace and not self.num:
            raise WrongUseError("a run needs requests: --num")

    def plan(self, rate: float, seed: int) -> LoadPlan:
        """Plans the requests of one run.

        Args:
            rate: mean requests a second. 0: the trace's own times, else one after another.
            seed: seed of arrivals and prompts.

        Raises:
            WrongUseError: `duration_s` leaves no request.
        """
        rng = np.random.default_rng((seed, _ARRIVALS))
        rows = self._rows(rng)
        if self.trace_arrivals:
            due_s = _stretched([row.at_s for row in rows], rate)
        elif rate > 0:
            due_s = np.cumsum(rng.exponential(1 / rate, len(rows))).tolist()
        else:
            due_s = [0.0] * len(rows)
        requests = tuple(
            Planned(i, due, row.prompt_tokens, row.output_tokens, row.blocks)
            for i, (due, row) in enumerate(zip(due_s, rows, strict=True))
            if not self.duration_s or due <= self.duration_s
        )
        if not requests:
            raise WrongUseError(f"no request is due within {self.duration_s} s")
        return LoadPlan(requests, seed, in_turn=rate <= 0 and not self.trace_arrivals)

    def _rows(self, rng: np.random.Generator) -> tuple[TraceRow, ...]:
        if not self.trace:
            return (TraceRow(0.0, self.prompt_tokens, self.output_tokens),) * self.num
        num = self.num or len(self.trace)
        first = 0 if self.trace_arrivals else int(rng.integers(len(self.trace) - num + 1))
        return self.trace[first : first + num]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations: each prompt is the one before, its answer's tokens, and a new message.

    The lengths of users' messages are log-normal. Half of them are short, and the longest tenth has
    most of the tokens. They are cut so that a conversation fits the context.
    """

    conversations: int
    turns: int
    think_s: float = 0.0
    """Mean time between an answer's end and the next turn, exponential."""
    output_tokens: int = 128
    system_tokens: int = 512
    """Length of the prompt with which all conversations begin."""
    median_tokens: float = 37.0
    p90_tokens: float = 4900.0
    context_tokens: int = 1 << 17
    """Most tokens of a conversation, with the last answer."""

    def __post_init__(self) -> None:
        if self.p90_tokens < self.median_tokens:
            raise WrongUseError("the 90th percentile of a message's length is below the median")
        least = self.system_tokens + self.turns * (1 + self.output_tokens)
        if least > self.context_tokens:
            raise WrongUseError(
                f"{self.turns} turns need {least} tokens, and a conversation may have "
                f"{self.context_tokens}"
            )

    def plan(self, rate: float, seed: int) -> LoadPlan:
        """Plans the requests of one run.

        Args:
            rate: conversations that begin in a second. 0: all at once.
            seed: seed of beginnings, think times, lengths and prompts.
        """
        rng = np.random.default_rng((seed, _ARRIVALS))
        gaps_s = rng.exponential(1 / rate, self.conversations) if rate > 0 else 0.0
        begins_s = np.cumsum(np.broadcast_to(gaps_s, self.conversations)).tolist()
        requests = [
            request
            for conversation, begin_s in enumerate(begins_s)
            for request in self._turns(rng, conversation, begin_s)
        ]
        return LoadPlan(tuple(requests), seed, conversations=self.conversations)

    def _turns(
        self, rng: np.random.Generator, conversation: int, begin_s: float
    ) -> Iterator[Planned]:
        left = self.context_tokens - self.system_tokens
        for index in range(self.turns):
            later = (self.turns - index - 1) * (1 + self.output_tokens)
            tokens = min(self._message_tokens(rng), left - self.output_tokens - later)
            left -= tokens + self.output_tokens
            think_s = float(rng.exponential(self.think_s)) if index and self.think_s else 0.0
            system = 0 if index else self.system_tokens
            turn = Turn(conversation, index, think_s, system)
            number = conversation * self.turns + index
            yield Planned(number, begin_s, system + tokens, self.output_tokens, turn=turn)

    def _message_tokens(self, rng: np.random.Generator) -> int:
        """Log-normal: the 90th percentile is 1.2816 standard deviations above the median."""
        sigma = math.log(self.p90_tokens / self.median_tokens) / 1.2816
        return max(1, round(float(rng.lognormal(math.log(self.median_tokens), sigma))))


def _stretched(at_s: list[float], rate: float) -> list[float]:
    """Scales times to another mean rate; a rate of 0 leaves them unchanged."""
    if rate <= 0 or at_s[-1] <= 0:
        return at_s
    factor = len(at_s) / rate / at_s[-1]
    return [at * factor for at in at_s]


def scaled(trace: tuple[TraceRow, ...], factor: float) -> tuple[TraceRow, ...]:
    """Returns a trace whose gaps are `factor` times as long."""
    return tuple(row._replace(at_s=row.at_s * factor) for row in trace)


def prompt_ids(
    request: Planned, seed: int, vocabulary: int, stream: int = _PROMPTS
) -> NDArray[np.int64]:
    """Draws the tokens of a prompt. Only shared blocks repeat within a run."""
    if request.turn and request.turn.system_tokens:
        system = np.random.default_rng((seed, _SYSTEM))
        own = request._replace(
            prompt_tokens=request.prompt_tokens - request.turn.system_tokens, turn=None
        )
        shared = system.integers(FIRST_ID, vocabulary, request.turn.system_tokens)
        return np.concatenate([shared, prompt_ids(own, seed, vocabulary, stream)])
    if not request.blocks:
        rng = np.random.default_rng((seed, stream, request.number))
        return rng.integers(FIRST_ID, vocabulary, request.prompt_tokens)
    blocks = [
        np.random.default_rng((seed, _BLOCKS, block)).integers(FIRST_ID, vocabulary, BLOCK_TOKENS)
        for block in request.blocks
    ]
    return np.concatenate(blocks)[: request.prompt_tokens]


def shared_prefix_share(plan: LoadPlan) -> float:
    """Share of a plan's prompt tokens that an ideal prefix cache would find."""
    if not plan.conversations:
        tokens = sum(request.prompt_tokens for request in plan.requests)
        return shared_prefix_tokens(plan.requests) / tokens
    prompts = shared = before = 0
    for number, request in enumerate(plan.requests):
        assert request.turn
        if not request.turn.number:
            before = request.turn.system_tokens if number else 0
            prompts += request.prompt_tokens
            now = request.prompt_tokens
        else:
            now = before + request.prompt_tokens
            prompts += now
        shared += before
        before = now + request.output_tokens
    return shared / prompts


def shared_prefix_tokens(requests: tuple[Planned, ...]) -> int:
    """Counts the prompt tokens that an ideal prefix cache would find, in whole blocks."""
    seen: set[int] = set()
    shared = 0
    for request in requests:
        full = request.blocks[: request.prompt_tokens // BLOCK_TOKENS]
        shared += BLOCK_TOKENS * sum(block in seen for block in full)
        seen.update(full)
    return shared
