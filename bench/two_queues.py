"""How near the router comes to the best that two workers could do for the first token.

python -m bench.two_queues [--load 1024@24 ...] [--without local known prediction] [--chunk 192]
                           [--draws 400] [--requests 300] [--json FILE]

On a virtual clock, nothing is computed: the router's own routing and load estimates
(`router.placement.routing`, `router.workers.load_estimate`) place prompts on a prefill worker and
a decode worker. Both are step machines with the step times of one H200 with an 8B model, as
`bench.step_time` measured them. Submits take a millisecond, load reports are made every 100 ms and
come 50 ms late. Arrivals are random, a fresh seed each draw.

A line for each load, in ms over all draws: the median of the p99s of the time to the first token,
the same for `ideal` (each prompt goes where it is done first, both queues known exactly) and for
one queue at the prefill worker; the median of the p50s; the p99 of the decode worker's steps, which
is its streams' time between tokens; and the share of misplaced prompts: those that would have been
done sooner at the other worker, by exact queues. Loads: TOKENS@RATE, `azure@RATE` (lengths of the
Azure conversation trace) and `lognormal@RATE` (mean 2,048 tokens in).

`--without local`: local prefill is off. `known`: no report says which attempts it contains, so that
all open ones are counted on top. `prediction`: decode steps are launched as the one before begins.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from baton.worker.v1 import worker_pb2
from bench.harness import write_json
from console.loadgen.trace_files import read_trace
from router.jobs import Demand, ServedModel
from router.placement import routing
from router.placement.policies import LeastWork
from router.workers.load_estimate import Capacity, LoadEstimate, Reservation

if TYPE_CHECKING:
    from router.settings import LocalPrefill
    from router.workers.link import WorkerLink

PREFILL_TOKEN_S = 25e-6
"""1,024 tokens took 25.4 ms and 8,000 took 201 (one H200, Llama-8B shape, 2026-11-22)."""
FULL_STEP_TOKENS, MOST_STEP_TOKENS = 1024, 4096
"""Bounds of a prefill worker, as `worker.engine_config` sets them."""
DECODE_STEP_S = 6.4e-3
"""Step of 40 rows of 1,100 tokens (`bench.step_time`, one H200, 2026-11-22)."""
CHUNK_TOKEN_S = 16e-6
"""With 192 prompt tokens beside them such a step takes 9.5 ms."""
TELL_S, SUBMIT_S, REPORT_EVERY_S, REPORT_LATE_S = 1e-3, 1e-3, 0.1, 0.05
LATE_S = 8e-3
"""What the ideal decode worker needs to begin and to tell: a step and a half."""
MODEL = ServedModel("m", "r", "", 1 << 17, 1, (), 16)


class Options(NamedTuple):
    """What is on."""

    local: bool = True
    known: bool = True
    prediction: bool = True
    chunk: int = 192


@dataclass(eq=False)
class Prompt:
    """One request's prompt, on its way to a first token."""

    id: bytes
    tokens: int
    arrived_s: float
    left: int = 0
    done_s: float = math.inf


class Queue:
    """A simulation's events in time order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = count()

    def at(self, when_s: float, then: Callable[[], None]) -> None:
        """Has something happen."""
        heapq.heappush(self._events, (when_s, next(self._ticket), then))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Lets everything happen until it is over."""
        while not is_over():
            self.now_s, _, then = heapq.heappop(self._events)
            then()


class Unaware(LoadEstimate):
    """Is told of no attempt that a report contains."""

    def report(self, load: worker_pb2.Load) -> None:
        """See `LoadEstimate`."""
        load.ClearField("known_attempts")
        super().report(load)


class Machine:
    """A worker: prompts in order, computed in steps; and the router's link to it."""

    def __init__(
        self, events: Queue, role: worker_pb2.WorkerRole.ValueType, options: Options
    ) -> None:
        model = worker_pb2.ModelInfo(name="m", revision="r", fingerprint="f")
        self.identity = worker_pb2.WorkerIdentity(worker_id=f"w{role}", role=role, model=model)
        self.worker_id, self.agent_name, self.draining = f"w{role}", f"w{role}", False
        self.estimate = LoadEstimate() if options.known else Unaware()
        self.model, self.kind = ("m", "r"), int(role)
        self.decodes = role == worker_pb2.WORKER_ROLE_DECODE
        self.prefills = not self.decodes
        self.steps_s: list[float] = []
        self._events, self._options = events, options
        self._queue: deque[Prompt] = deque()
        self._step: list[tuple[Prompt, int]] = []
        self._step_ends_s = 0.0
        self._busy = False
        self._rate = 0.0
        self._rate_at_s = 0.0
        self._unreported: list[bytes] = []
        self.report()
        events.at(REPORT_EVERY_S, self._report_again)

    def capacity(self) -> Capacity:
        """See `WorkerLink`."""
        return self.estimate.capacity()

    def serves(self, _model: object) -> bool:
        """See `WorkerLink`."""
        return True

    def avoids(self, _other: object) -> bool:
        """See `WorkerLink`."""
        return False

    complained_of = gave_up_on = extensions = frozenset[str]()
    fingerprint = "f"
    """See `WorkerLink`."""

    @property
    def queued_tokens(self) -> int:
        """Taken on and not computed."""
        return sum(one.left for one in self._queue) + sum(tokens for _, tokens in self._step)

    def submit(self, prompt: Prompt) -> None:
        """A prompt comes."""
        prompt.left = prompt.tokens
        self._queue.append(prompt)
        self._unreported.append(prompt.id)
        if not self._busy:
            self._busy = True
            self._events.at(self._next_plan_s(), self._plan)

    def finish_s(self, tokens: int) -> float:
        """When a prompt that came now would be done, exactly."""
        ahead = sum(one.left for one in self._queue)
        begins_s = max(self._events.now_s, self._step_ends_s if self._step else 0.0)
        if not self.decodes:
            return begins_s + (ahead + tokens) * PREFILL_TOKEN_S
        steps = math.ceil((ahead + tokens) / self._options.chunk)
        return begins_s + steps * DECODE_STEP_S + (ahead + tokens) * CHUNK_TOKEN_S

    def report(self) -> None:
        """Makes a load report, which comes late."""
        queued, known = self.queued_tokens, self._unreported
        self._unreported = []
        step = MOST_STEP_TOKENS if not self.decodes else 512
        load = worker_pb2.Load(
            queued_prefill_tokens=queued,
            prefill_credit_tokens=2 * step - queued,
            prefill_tokens_per_s=self._rate,
            prefill_rate_age_s=self._events.now_s - self._rate_at_s,
            max_sequences=1 << 20,
            total_pages=1 << 24,
            free_pages=1 << 24,
            known_attempts=known,
        )
        self._events.at(self._events.now_s + REPORT_LATE_S, lambda: self.estimate.report(load))

    def _report_again(self) -> None:
        self.report()
        self._events.at(self._events.now_s + REPORT_EVERY_S, self._report_again)

    def _next_plan_s(self) -> float:
        """A decode worker's steps follow each other whether a prompt is there or not."""
        now_s = self._events.now_s
        if not self.decodes:
            return now_s
        steps = math.ceil((now_s - self._step_ends_s) / DECODE_STEP_S)
        wait = 0 if self._options.prediction else DECODE_STEP_S
        return self._step_ends_s + steps * DECODE_STEP_S + wait

    def _plan(self) -> None:
        budget = self._options.chunk if self.decodes else MOST_STEP_TOKENS
        while self._queue and budget > 0:
            prompt = self._queue[0]
            tokens = min(prompt.left, budget)
            self._step.append((prompt, tokens))
            prompt.left -= tokens
            taken = sum(part for _, part in self._step)
            budget = min(budget - tokens, budget if self.decodes else FULL_STEP_TOKENS - taken)
            if prompt.left:
                break
            self._queue.popleft()
        tokens = sum(part for _, part in self._step)
        if self.decodes:
            step_s = DECODE_STEP_S + tokens * CHUNK_TOKEN_S
        else:
            step_s = tokens * PREFILL_TOKEN_S
        self.steps_s.append(step_s)
        self._step_ends_s = self._events.now_s + step_s
        self._events.at(self._step_ends_s, lambda: self._settle(tokens, step_s))

    def _settle(self, tokens: int, step_s: float) -> None:
        if tokens >= 64:
            rate = tokens / step_s
            self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate
            self._rate_at_s = self._events.now_s
        for prompt, _ in self._step:
            if not prompt.left:
                prompt.done_s = self._events.now_s + TELL_S
                self._events.at(prompt.done_s, partial(self.estimate.release, prompt.id))
        self._step = []
        self._busy = bool(self._queue)
        if self._busy:
            self._plan()


@dataclass
class Run:
    """One draw: a router, its queue and two workers."""

    prompts: Sequence[Prompt]
    options: Options
    misplaced: int = 0
    waiting: deque[Prompt] = field(default_factory=deque)

    def run(self) -> Machine:
        """Returns the decode worker behind the last first token."""
        self.events = Queue()
        roles = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
        self.workers = [Machine(self.events, role, self.options) for role in roles]
        for prompt in self.prompts:
            self.events.at(prompt.arrived_s, partial(self._arrive, prompt))
        self._pump_on()
        last = self.prompts[-1]
        self.events.run(
            lambda: math.isfinite(last.done_s) and not self.waiting and self._all_done()
        )
        return self.workers[1]

    def _all_done(self) -> bool:
        return all(math.isfinite(prompt.done_s) for prompt in self.prompts)

    def _arrive(self, prompt: Prompt) -> None:
        self.waiting.append(prompt)
        self._pump()

    def _pump_on(self) -> None:
        """Whatever may make room is noticed within a millisecond."""
        self._pump()
        self.events.at(self.events.now_s + 1e-3, self._pump_on)

    def _pump(self) -> None:
        local: LocalPrefill = "auto" if self.options.local else "never"
        while self.waiting:
            prompt = self.waiting[0]
            demand = Demand(MODEL, prompt.tokens, 64, 1)
            workers = cast("list[WorkerLink]", self.workers)
            route = routing.choose(demand, workers, LeastWork(), routing.Failed(), local)
            if route is None:
                return
            self.waiting.popleft()
            self._place(prompt, self.workers[route.whole])

    def _place(self, prompt: Prompt, worker: Machine) -> None:
        finishes_s = {one: one.finish_s(prompt.tokens) for one in self.workers}
        if self.options.local:
            self.misplaced += finishes_s[worker] > min(finishes_s.values()) + 1e-3
        worker.estimate.reserve(prompt.id, Reservation(prefill_tokens=prompt.tokens))
        self.events.at(self.events.now_s + SUBMIT_S, lambda: worker.submit(prompt))


def first_tokens_s(prompts: Sequence[Prompt], chunk: int, *, local: bool) -> list[float]:
    """Seconds to each first token where both queues are known, or with the prefill worker alone."""
    free_s, found = [0.0, 0.0], []
    for prompt in prompts:
        local_s = math.ceil(prompt.tokens / chunk) * DECODE_STEP_S + prompt.tokens * CHUNK_TOKEN_S
        took_s = [prompt.tokens * PREFILL_TOKEN_S, local_s if local else math.inf]
        done_s = [
            max(prompt.arrived_s, free) + took for free, took in zip(free_s, took_s, strict=True)
        ]
        where = int(done_s[1] < done_s[0])
        free_s[where] = done_s[where]
        found.append(done_s[where] - prompt.arrived_s + where * LATE_S)
    return found


def lengths_of(name: str) -> list[int]:
    """What prompts of a load are drawn from."""
    if name.isdigit():
        return [int(name)]
    if name == "azure":
        return [max(1, row.prompt_tokens) for row in read_trace("azure-conversation")]
    drawn = np.random.default_rng(0).lognormal(math.log(2048) - 0.32, 0.8, 2000)
    return [min(8192, max(1, round(tokens))) for tokens in drawn.tolist()]


def draw(lengths: Sequence[int], rate: float, requests: int, seed: int) -> list[Prompt]:
    """The prompts of one draw."""
    rng = np.random.default_rng(seed)
    arrivals_s = rng.exponential(1 / rate, requests).cumsum().tolist()
    picked = rng.integers(len(lengths), size=requests).tolist()
    return [
        Prompt(i.to_bytes(4, "big"), lengths[pick], at_s)
        for i, (at_s, pick) in enumerate(zip(arrivals_s, picked, strict=True))
    ]


def simulate(load: str, options: Options, draws: int, requests: int) -> dict[str, Any]:
    """All draws of a load; prints its line and returns it."""
    name, _, rate = load.partition("@")
    lengths = lengths_of(name)
    ideal, alone, tails, middles, steps_s, misplaced = [], [], [], [], [], 0
    for seed in range(draws):
        prompts = draw(lengths, float(rate), requests, seed)
        ideal.append(np.percentile(first_tokens_s(prompts, options.chunk, local=True), 99))
        alone.append(np.percentile(first_tokens_s(prompts, options.chunk, local=False), 99))
        run = Run(prompts, options)
        decode = run.run()
        waits_s = [prompt.done_s - prompt.arrived_s for prompt in prompts]
        tails.append(np.percentile(waits_s, 99))
        middles.append(np.percentile(waits_s, 50))
        span_s = prompts[-1].arrived_s
        idle = max(0, round((span_s - sum(decode.steps_s)) / DECODE_STEP_S))
        steps_s.append(np.percentile([*decode.steps_s, *[DECODE_STEP_S] * idle], 99))
        misplaced += run.misplaced
    found = {
        name: 1e3 * float(np.median(values))
        for name, values in (
            ("p99_ms", tails), ("ideal_p99_ms", ideal), ("one_queue_p99_ms", alone),
            ("p50_ms", middles), ("step_p99_ms", steps_s),
        )
    }  # fmt: skip
    found["of_ideal"] = found["p99_ms"] / found["ideal_p99_ms"]
    found["misplaced"] = misplaced / (draws * requests)
    cells = "  ".join(f"{key} {value:.3f}" if value < 10 else f"{key} {value:.0f}"
                      for key, value in found.items())  # fmt: skip
    print(f"{load:14} {cells}", flush=True)
    return {"load": load, **options._asdict(), **found}


def main() -> None:
    """Prints a line for each load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", nargs="+", default=["1024@24", "8000@3"])
    parser.add_argument(
        "--without", nargs="*", default=[], choices=["local", "known", "prediction"]
    )
    parser.add_argument("--chunk", type=int, default=192)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    off = dict.fromkeys(arguments.without, False)
    options = Options(chunk=arguments.chunk, **off)
    found = [
        simulate(load, options, arguments.draws, arguments.requests) for load in arguments.load
    ]
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
