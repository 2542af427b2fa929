"""Requests through prefill and decode workers, or through replicas that do both, step by step.

Nothing is computed. A prompt waits for the prefill worker that is free first, and its pages for the
decode worker with the fewest rows; a replica computes prompts in chunks beside its rows, and in
large steps without. Of each request are kept its first token and the longest of its own gaps but
1 %.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from console.planning.rates import CHUNK_SHARE, HAND_OFF_S, PREFILL_STEP_S, ROUTER_S, Rates
from worker.engine_config import BOTH_STEP_TOKENS, MIXED_PREFILL_TOKENS

MOST_ROWS: Final = 256
"""Rows of a decode batch: the most that a worker has by default on large GPUs."""


class Asked(NamedTuple):
    """A request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


class Plan(NamedTuple):
    """Numbers of workers. `both` replicas do all, and then there are no others."""

    prefill: int
    decode: int
    both: int = 0

    def __str__(self) -> str:
        return f"{self.both} both" if self.both else f"{self.prefill}P{self.decode}D"


@dataclass
class Served:
    """What came of the requests, in order of arrival, seconds."""

    first_s: np.ndarray
    gap_s: np.ndarray
    """The 99th percentile of each request's own times between tokens; 0 for one token."""
    token_s: np.ndarray
    """The mean of these times."""
    busy: dict[str, float] = field(default_factory=dict)
    """Part of the time that each role works."""

    def kept(self, first_s: float, gap_s: float) -> float:
        """The part of the requests that keep a service level. A row that waits for pages has one
        gap too long, which the 99th percentile may leave out, so the mean is looked at as well."""
        gaps_s = np.maximum(self.gap_s, self.token_s)
        return float(np.mean((self.first_s <= first_s) & (gaps_s <= gap_s)))


class _Row(NamedTuple):
    """A sequence that decodes."""

    ends: int
    """Number of the step that brings its last token."""
    request: int
    begins: int
    ready_s: float
    """When its first token was there."""


class _Decoder:
    """One worker's decode steps."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.most_rows = MOST_ROWS
        self.now_s = 0.0
        self.ends: list[float] = []
        """When each step ended."""
        self.rows: list[_Row] = []
        self.context = 0
        self.busy_s = 0.0
        self.promised = 0
        """Rows that run or wait."""
        self.waiting: deque[tuple[float, int, float]] = deque()
        """Requests whose pages are there: when, which, and when their first token came."""

    def step(self, asked: Sequence[Asked], prompt_s: float, times: _Times) -> None:
        """One step. `prompt_s`: what a prompt's piece beside the rows adds."""
        while self.waiting and self.waiting[0][0] <= self.now_s and len(self.rows) < self.most_rows:
            _, request, ready_s = self.waiting.popleft()
            number = len(self.ends)
            tokens = asked[request].output_tokens - 1
            heapq.heappush(self.rows, _Row(number + tokens - 1, request, number, ready_s))
            self.context += asked[request].prompt_tokens
        took_s = prompt_s
        if self.rows:
            took_s += self.rates.decode_s(len(self.rows), self.context)
        self.now_s += took_s
        self.busy_s += took_s
        self.context += len(self.rows)
        number = len(self.ends)
        self.ends.append(self.now_s)
        while self.rows and self.rows[0].ends <= number:
            row = heapq.heappop(self.rows)
            one = asked[row.request]
            self.context -= one.prompt_tokens + one.output_tokens - 1
            self.promised -= 1
            times.tokens(row.request, [row.ready_s, *self.ends[row.begins : number + 1]])


class _Times:
    def __init__(self, count: int) -> None:
        self.first = np.zeros(count)
        self.gap = np.zeros(count)
        self.mean = np.zeros(count)

    def tokens(self, request: int, times: Sequence[float]) -> None:
        gaps = np.diff(times)
        self.gap[request] = np.percentile(gaps, 99)
        self.mean[request] = gaps.mean()


def simulate(
    asked: Sequence[Asked], plan: Plan, rates: Rates, decode: Rates | None = None
) -> Served:
    """Serves all requests, which come in order of time. `decode`: of decode workers, where theirs
    are others."""
    times = _Times(len(asked))
    decode = decode or rates
    workers = [_Decoder(decode) for _ in range(plan.both or plan.decode)]
    mean = sum(one.prompt_tokens + one.output_tokens for one in asked) // len(asked)
    for worker in workers:
        worker.most_rows = max(1, min(MOST_ROWS, decode.kv_tokens // mean))
    if plan.both:
        busy_s = {"both": _replicas(asked, workers, times)}
    else:
        prefill_s = _apart(asked, plan, workers, rates, times)
        decode_s = sum(worker.busy_s for worker in workers) / len(workers)
        busy_s = {"prefill": prefill_s / plan.prefill, "decode": decode_s}
    lasted_s = max(worker.now_s for worker in workers) or 1.0
    busy = {role: min(1.0, each / lasted_s) for role, each in busy_s.items()}
    return Served(times.first, times.gap, times.mean, busy)


def _apart(
    asked: Sequence[Asked], plan: Plan, workers: list[_Decoder], rates: Rates, times: _Times
) -> float:
    """Prompts on workers of their own; returns the time that these work."""
    free = [0.0] * plan.prefill
    ready: list[tuple[float, int, float]] = []
    busy_s = 0.0
    for request, one in enumerate(asked):
        took_s = PREFILL_STEP_S + rates.prompt_s(one.prompt_tokens)
        busy_s += took_s
        free_s = max(heapq.heappop(free), one.at_s + ROUTER_S) + took_s
        heapq.heappush(free, free_s)
        done_s = free_s + rates.lag_s(one.prompt_tokens)
        times.first[request] = done_s + ROUTER_S - one.at_s
        if one.output_tokens > 1:
            ready.append((done_s + HAND_OFF_S, request, done_s))
    for at_s, request, first_s in sorted(ready):
        for worker in workers:
            _run_until(worker, at_s, asked, times)
        worker = min(workers, key=lambda one: one.promised)
        worker.promised += 1
        worker.waiting.append((at_s, request, first_s))
    for worker in workers:
        _run_until(worker, np.inf, asked, times)
    return busy_s


def _run_until(worker: _Decoder, at_s: float, asked: Sequence[Asked], times: _Times) -> None:
    while worker.now_s < at_s and (worker.rows or worker.waiting):
        if not worker.rows:
            worker.now_s = max(worker.now_s, worker.waiting[0][0])
        worker.step(asked, 0.0, times)
    if at_s < np.inf:
        worker.now_s = max(worker.now_s, at_s)


def _replicas(asked: Sequence[Asked], workers: list[_Decoder], times: _Times) -> float:
    """Prompts in chunks beside rows; returns the time that a worker works."""
    prompts: list[deque[list[int]]] = [deque() for _ in workers]
    for request, one in enumerate(asked):
        came_s = one.at_s + ROUTER_S
        for worker, queue in zip(workers, prompts, strict=True):
            _turns(worker, queue, came_s, asked, times)
        least = min(
            range(len(workers)), key=lambda n: (sum(q for _, q in prompts[n]), workers[n].promised)
        )
        workers[least].promised += 1
        prompts[least].append([request, one.prompt_tokens])
    for worker, queue in zip(workers, prompts, strict=True):
        _turns(worker, queue, np.inf, asked, times)
    return sum(worker.busy_s for worker in workers) / len(workers)


def _turns(
    worker: _Decoder,
    queue: deque[list[int]],
    until_s: float,
    asked: Sequence[Asked],
    times: _Times,
) -> None:
    while worker.now_s < until_s and (worker.rows or worker.waiting or queue):
        if not (worker.rows or queue):
            worker.now_s = max(worker.now_s, worker.waiting[0][0])
        decodes = bool(worker.rows or (worker.waiting and worker.waiting[0][0] <= worker.now_s))
        most = MIXED_PREFILL_TOKENS if decodes else BOTH_STEP_TOKENS
        room, done, prompt_s = most, [], 0.0
        while queue and room:
            request, left = queue[0]
            taken, before = min(room, left), asked[request].prompt_tokens - left
            prompt_s += worker.rates.prompt_s(taken, before, CHUNK_SHARE if decodes else 1.0)
            queue[0][1] -= taken
            room -= taken
            if queue[0][1]:
                break
            done.append(queue.popleft()[0])
        prompt_s += 0.0 if decodes or room == most else PREFILL_STEP_S
        worker.step(asked, prompt_s, times)
        for request in done:
            done_s = worker.now_s + worker.rates.lag_s(asked[request].prompt_tokens)
            times.first[request] = done_s + ROUTER_S - asked[request].at_s
            if asked[request].output_tokens > 1:
                worker.waiting.append((done_s, request, done_s))
            else:
                worker.promised -= 1
    if until_s < np.inf:
        worker.now_s = max(worker.now_s, until_s)
