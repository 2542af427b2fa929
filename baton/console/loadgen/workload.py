"""Plans the requests of a run and their times, before anything is sent.

Each prompt is drawn from the run's seed and the request's number. So prompts share only the
prefixes that a trace names, and any process can write any request. The same seed gives the same
prompts: a second run with it may find them in prefix caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.console.loadgen.errors import WrongUseError
from baton.console.loadgen.trace_files import BLOCK_TOKENS, TraceRow

FIRST_ID: Final = 10
"""Smallest token id that is drawn: lower ids are often special."""
DEFAULT_NUM: Final = 100
_ARRIVALS, _PROMPTS, _BLOCKS, WARM_UPS = range(4)
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


class LoadPlan(NamedTuple):
    """All requests of one run, in the order of due times."""

    requests: tuple[Planned, ...]
    seed: int
    in_turn: bool = False
    """Whether each request waits for the end of the one before; `due_s` is then unused."""

    @property
    def rate(self) -> float:
        """Mean requests a second; 0 in turn or for a single request."""
        last_s = self.requests[-1].due_s
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
    if not request.blocks:
        rng = np.random.default_rng((seed, stream, request.number))
        return rng.integers(FIRST_ID, vocabulary, request.prompt_tokens)
    blocks = [
        np.random.default_rng((seed, _BLOCKS, block)).integers(FIRST_ID, vocabulary, BLOCK_TOKENS)
        for block in request.blocks
    ]
    return np.concatenate(blocks)[: request.prompt_tokens]


def shared_prefix_tokens(requests: tuple[Planned, ...]) -> int:
    """Counts the prompt tokens that an ideal prefix cache would find, in whole blocks."""
    seen: set[int] = set()
    shared = 0
    for request in requests:
        full = request.blocks[: request.prompt_tokens // BLOCK_TOKENS]
        shared += BLOCK_TOKENS * sum(block in seen for block in full)
        seen.update(full)
    return shared
