"""What to send, and when: planned in full before anything is sent.

Every request's prompt is drawn for itself, from the run's seed and its own number, so that nothing
but what a trace says is shared: no prefix cache helps by accident, and any process can write any
request. The same seed gives the same prompts, so a second run with it would find them cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.bench.errors import WrongUseError
from baton.bench.trace_files import BLOCK_TOKENS, TraceRow

FIRST_ID: Final = 10
"""Ids below it are often special."""
DEFAULT_NUM: Final = 100
_ARRIVALS, _PROMPTS, _BLOCKS, WARM_UPS = range(4)
"""Streams of random numbers of one seed."""


class Planned(NamedTuple):
    """One request to come."""

    number: int
    """In the order in which requests are due."""
    due_s: float
    """After the start of the run."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """As in `TraceRow`."""


class Plan(NamedTuple):
    """All requests of one run, in the order in which they are due."""

    requests: tuple[Planned, ...]
    seed: int
    in_turn: bool = False
    """Each is sent when the one before has ended; `due_s` means nothing."""

    @property
    def rate(self) -> float:
        """Requests a second, over the gaps between them; 0 in turn or for a single one."""
        last_s = self.requests[-1].due_s
        return 0.0 if self.in_turn or last_s <= 0 else len(self.requests) / last_s


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of requests and how they arrive."""

    num: int
    """Requests of a run. 0: all of the trace that fit."""
    prompt_tokens: int = 1024
    output_tokens: int = 128
    trace: tuple[TraceRow, ...] = ()
    """Lengths, and prefixes where it has any, come from it; empty: all are as above."""
    trace_arrivals: bool = False
    """Requests come when the trace says, from its first one on. Else arrivals are a Poisson
    process and the run takes the trace's lengths in order from a row drawn by its seed."""
    duration_s: float = 0.0
    """Requests due later are left out. 0: none are."""

    def __post_init__(self) -> None:
        if self.trace and self.num > len(self.trace):
            raise WrongUseError(
                f"the trace has {len(self.trace):,} requests that fit, not {self.num}"
            )
        if self.trace_arrivals and not self.trace:
            raise WrongUseError("only a trace has arrivals of its own: --trace")
        if not self.trace and not self.num:
            raise WrongUseError("a run needs requests: --num")

    def plan(self, rate: float, seed: int) -> Plan:
        """The requests of one run.

        Args:
            rate: requests a second, on average. 0: the trace's own times, else one after another.
            seed: of arrivals and of prompts.

        Raises:
            WrongUseError: `duration_s` leaves nothing.
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
        return Plan(requests, seed, in_turn=rate <= 0 and not self.trace_arrivals)

    def _rows(self, rng: np.random.Generator) -> tuple[TraceRow, ...]:
        if not self.trace:
            return (TraceRow(0.0, self.prompt_tokens, self.output_tokens),) * self.num
        num = self.num or len(self.trace)
        first = 0 if self.trace_arrivals else int(rng.integers(len(self.trace) - num + 1))
        return self.trace[first : first + num]


def _stretched(at_s: list[float], rate: float) -> list[float]:
    """Times with the same pattern at another mean rate; 0 leaves them."""
    if rate <= 0 or at_s[-1] <= 0:
        return at_s
    factor = len(at_s) / rate / at_s[-1]
    return [at * factor for at in at_s]


def scaled(trace: tuple[TraceRow, ...], factor: float) -> tuple[TraceRow, ...]:
    """A trace whose gaps are `factor` times as long."""
    return tuple(row._replace(at_s=row.at_s * factor) for row in trace)


def prompt_ids(
    request: Planned, seed: int, vocabulary: int, stream: int = _PROMPTS
) -> NDArray[np.int64]:
    """The tokens of a prompt: new in every run and for every request, but for shared blocks."""
    if not request.blocks:
        rng = np.random.default_rng((seed, stream, request.number))
        return rng.integers(FIRST_ID, vocabulary, request.prompt_tokens)
    blocks = [
        np.random.default_rng((seed, _BLOCKS, block)).integers(FIRST_ID, vocabulary, BLOCK_TOKENS)
        for block in request.blocks
    ]
    return np.concatenate(blocks)[: request.prompt_tokens]


def shared_prefix_tokens(requests: tuple[Planned, ...]) -> int:
    """Prompt tokens that an ideal prefix cache would find, in whole blocks."""
    seen: set[int] = set()
    shared = 0
    for request in requests:
        full = request.blocks[: request.prompt_tokens // BLOCK_TOKENS]
        shared += BLOCK_TOKENS * sum(block in seen for block in full)
        seen.update(full)
    return shared
