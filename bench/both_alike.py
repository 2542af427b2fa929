"""Workers that do both, on a virtual clock: what policies and the delay of streams do.

python -m bench.both_alike [--load 1024+256@24 ...] [--both 2] [--rules cost own none least_work]
                           [--noise 0.05] [--launch-ms 20] [--late] [--draws 8] [--requests 250]

Nothing is computed. The router's own routing and load estimates place requests, and workers measure
their steps by the engine's own rates (`engine.loop.rates`) and launch by its own pacer. A worker's
step holds every row, and prompts in order up to 2,048 tokens with the rows. Steps last what those
of an H200 with an 8B model do (see below), times a log-normal noise. The host needs `--launch-ms`
to launch a step with a prompt, and launches and settles nothing meanwhile. Load reports are sent
ten times a second.

Rules: `cost`, where a piece's delay is the mean of the workers; `own`, where it is each worker's
own, as until 1f677b9; `none`, where streams count nothing; `least_work`. `--late`: the host takes
the time of a step when it settles it, as until b777c89.

Loads: TOKENS+OUTPUT@RATE, `azure@RATE` (lengths of the Azure conversation trace, prompts below
8,192 tokens), `lognormal@RATE` (mean 2,048 tokens in and 200 out). Arrivals are random.

A line for each load and rule, medians over the draws: ms to the first token (p50, p99), ms from the
first token to the second on average, ms a token (p50, p99 of requests), ms of a request on average,
and how often two requests in a row had the same worker.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from baton.worker.v1 import worker_pb2
from bench.two_queues import MODEL, Queue
from console.loadgen.trace_files import read_trace
from engine.loop.pacing import LaunchPacer
from engine.loop.rates import StepRates
from router.jobs import Demand
from router.placement import cost, routing
from router.placement.placing import Piece, usual_piece
from router.workers.load_estimate import Capacity, LoadEstimate

if TYPE_CHECKING:
    from engine.step.plan import StepPlan
    from router.placement.policies import Policy
    from router.workers.link import WorkerLink

STEP_TOKENS, SLOTS, PAGE = 2048, 128, 16
PROMPT_TOKEN_S, PROMPT_CONTEXT_S = 20.8e-6, 1.25e-9
"""A token of a prompt, and more for each token before it: 1,024 tokens took 21.6 ms, 8,000 took 208
(two H200, `bench/pd_beside.sh`, 2026-11-26)."""
STEP_S, ROW_S, CONTEXT_S = 4.05e-3, 55e-6, 34e-9
"""A step with rows, each row, and each token of their contexts: one row took 4.1 ms a token, and 20
rows of 1,150 tokens 6.0 (the same runs)."""
BESIDE_S = 6e-3
"""A prompt beside rows, more than by itself: with 20 rows its step took 30 ms (the same runs)."""
HOST_S, DECODE_LAUNCH_S = 2e-4, 1e-3
TELL_S, REPORT_S, REPORT_LATE_S, PUMP_S = 1e-3, 0.1, 2e-3, 5e-3


@dataclass(eq=False)
class Asked:
    """A request."""

    id: bytes
    at_s: float
    tokens: int
    output_tokens: int
    left: int = field(init=False)
    """Prompt tokens that no step has yet."""
    planned: int = 0
    """Output tokens of planned steps."""
    told_s: list[float] = field(default_factory=list)
    """When each token was there."""
    worker: str = ""

    def __post_init__(self) -> None:
        self.left = self.tokens


class Chunk(NamedTuple):
    """A part of a prompt in a step, as `ChunkPlan`."""

    request: Asked
    start: int
    end: int


@dataclass(eq=False)
class Step:
    """A step, with what rates and pacer read of a `StepPlan`."""

    rows: list[Asked]
    chunks: list[Chunk]
    at_s: float
    lasts_s: float = 0.0
    ended_s: float = 0.0

    num_decodes = property(lambda self: len(self.rows))
    prompt_tokens = property(lambda self: sum(one.end - one.start for one in self.chunks))
    only_decodes = property(lambda self: not self.chunks)
    sample_slots = ()

    @property
    def plan(self) -> StepPlan:
        """Itself."""
        return cast("StepPlan", self)


class Machine:
    """A worker that does both, and the router's link to it."""

    draining, page_bytes = False, 0
    measured = complained_of = gave_up_on = frozenset[str]()
    """See `WorkerLink`."""

    def __init__(
        self, events: Queue, name: str, options: argparse.Namespace, told: Callable[[], None]
    ) -> None:
        model = worker_pb2.ModelInfo(name="m", revision="r", fingerprint="f")
        both = worker_pb2.WORKER_ROLE_BOTH
        self.identity = worker_pb2.WorkerIdentity(worker_id=name, role=both, model=model)
        self.worker_id = self.agent_name = name
        self.estimate = LoadEstimate()
        self._events, self._options, self._told = events, options, told
        self._noise = np.random.default_rng(int(name))
        self._rates, self._pacer = StepRates(), LaunchPacer(lambda: events.now_s)
        self._waiting: deque[Asked] = deque()
        self._rows: list[Asked] = []
        self._flights: deque[Step] = deque()
        self._host_free_s = 0.0
        self._awaits_work = False
        """A step is in flight, and nothing could be launched behind it."""
        self._untold: list[bytes] = []
        self._report()

    def capacity(self) -> Capacity:
        """See `WorkerLink`."""
        return self.estimate.capacity()

    def avoids(self, _other: object) -> bool:
        """See `WorkerLink`."""
        return False

    def submit(self, request: Asked) -> None:
        """A request comes."""
        self._waiting.append(request)
        self._untold.append(request.id)
        if not self._flights:
            self._plan()
        elif self._awaits_work:
            self._plan_when_due(self._flights[0])

    def _plan_when_due(self, flight: Step) -> None:
        wait_s = 0.0  # Rows follow a step with prompts at once.
        if flight.only_decodes or self._awaits_work:
            began_s, usual_s = self._rates.began(flight.at_s), self._rates.usual_s(flight.plan)
            wait_s = self._pacer.wait_s(flight.plan, began_s, usual_s)
        due_s = max(self._events.now_s + wait_s, self._host_free_s) + HOST_S
        self._events.at(due_s, lambda: self._plan_behind(flight))

    def _plan_behind(self, flight: Step) -> None:
        if len(self._flights) == 1 and self._flights[0] is flight:
            self._plan()

    def _plan(self) -> None:
        rows = [one for one in self._rows if one.planned < one.output_tokens]
        step = Step(rows, self._chunks(STEP_TOKENS - len(rows)), self._events.now_s)
        self._awaits_work = not rows and not step.chunks
        if self._awaits_work:
            return
        for one in rows:
            one.planned += 1
        step.lasts_s = _lasts_s(step) * self._noise.lognormal(0, self._options.noise)
        for chunk in step.chunks:
            if chunk.end == chunk.request.tokens:
                chunk.request.planned = 1
        self._pacer.woke()
        launch_s = self._options.launch_ms / 1e3 if step.chunks else DECODE_LAUNCH_S
        self._host_free_s = max(self._host_free_s, self._events.now_s) + launch_s
        self._events.at(self._host_free_s, self._pacer.launched)
        self._flights.append(step)
        if len(self._flights) == 1:
            self._begin(step)

    def _chunks(self, budget: int) -> list[Chunk]:
        """As `engine.schedule.planning` cuts them."""
        found = []
        while self._waiting and budget > 0:
            request = self._waiting[0]
            tokens = min(request.left, budget)
            tokens -= 0 if tokens == request.left else tokens % PAGE
            start = request.tokens - request.left
            found.append(Chunk(request, start, start + tokens))
            request.left -= tokens
            budget -= tokens
            if request.left:
                break
            self._rows.append(self._waiting.popleft())
        return [chunk for chunk in found if chunk.end > chunk.start]

    def _begin(self, step: Step) -> None:
        self._events.at(self._events.now_s + step.lasts_s, lambda: self._end(step))
        self._plan_when_due(step)

    def _end(self, step: Step) -> None:
        self._flights.popleft()
        step.ended_s = self._events.now_s
        if self._flights:
            self._begin(self._flights[0])
        self._events.at(max(step.ended_s, self._host_free_s), lambda: self._settle(step))

    def _settle(self, step: Step) -> None:
        now_s = self._events.now_s
        ended_s = now_s if self._options.late else step.ended_s
        self._rates.settled(step.plan, step.at_s, ended_s)
        self._pacer.settled(step.plan, self._rates.step_s)
        for one in step.rows:
            self._tell(one)
        for chunk in step.chunks:
            if chunk.end == chunk.request.tokens:
                self._tell(chunk.request)
                release = partial(self.estimate.prefilled, chunk.request.id)
                self._events.at(now_s + TELL_S, release)
        if not self._flights:
            self._plan()

    def _tell(self, request: Asked) -> None:
        request.told_s.append(self._events.now_s)
        if len(request.told_s) == request.output_tokens:
            self._rows.remove(request)
            release = partial(self.estimate.release, request.id)
            self._events.at(self._events.now_s + TELL_S, release)
            self._told()

    def _report(self) -> None:
        now_s, rates, token = self._events.now_s, self._rates, self._rates.token_cost
        queued = sum(one.left for one in self._waiting)
        queued += sum(step.prompt_tokens for step in self._flights)
        load = worker_pb2.Load(
            queued_prefill_tokens=queued, prefill_credit_tokens=2 * STEP_TOKENS - queued,
            prefill_tokens_per_s=rates.prefill.tokens_per_s, prefill_token_s=token.token_s,
            prefill_context_s=token.context_s, piece_delay_ms=1e3 * rates.piece.seconds,
            piece_tokens=rates.piece.tokens, running_sequences=len(self._rows) + len(self._waiting),
            max_sequences=SLOTS, total_pages=1 << 20, free_pages=1 << 20,
            known_attempts=self._untold,
        )  # fmt: skip
        self._untold = []
        self._events.at(now_s + REPORT_LATE_S, lambda: self.estimate.report(load))
        self._events.at(now_s + REPORT_S, self._report)


def _lasts_s(step: Step) -> float:
    """Seconds of a step without noise."""
    contexts = sum(row.tokens + row.planned for row in step.rows)
    rows_s = ROW_S * len(step.rows) + CONTEXT_S * contexts
    if not step.chunks:
        return STEP_S + rows_s
    prompts_s = sum(
        (one.end - one.start) * (PROMPT_TOKEN_S + PROMPT_CONTEXT_S * (one.start + one.end) / 2)
        for one in step.chunks
    )
    return prompts_s + (BESIDE_S + rows_s if step.rows else 0.0)


class Run:
    """One draw under one rule."""

    def __init__(
        self, requests: Sequence[Asked], policy: Policy, options: argparse.Namespace
    ) -> None:
        self._events, self._policy, self._left = Queue(), policy, len(requests)
        names = map(str, range(options.both))
        self._workers = [Machine(self._events, name, options, self._over) for name in names]
        self._waiting: deque[Asked] = deque()
        for request in requests:
            self._events.at(request.at_s, partial(self._arrive, request))
        self._pump_on()
        self._events.run(lambda: not self._left)

    def _over(self) -> None:
        self._left -= 1

    def _arrive(self, request: Asked) -> None:
        self._waiting.append(request)
        self._pump()

    def _pump_on(self) -> None:
        self._pump()
        self._events.at(self._events.now_s + PUMP_S, self._pump_on)

    def _pump(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            demand = Demand(MODEL, request.tokens, request.output_tokens, 1)
            workers = cast("list[WorkerLink]", self._workers)
            route = routing.choose(demand, workers, self._policy, routing.Failed(), "cached")
            if route is None:
                return
            self._waiting.popleft()
            worker = cast("Machine", route.prefill)
            request.worker = worker.worker_id
            part = routing.decode_reservation(demand)._replace(prefill_tokens=request.tokens)
            worker.estimate.reserve(request.id, part)
            self._events.at(self._events.now_s + TELL_S, partial(worker.submit, request))


PIECES: Final[dict[str, Callable[[Any, Any], Piece]]] = {
    "cost": cost.Usual.piece,
    "own": lambda _usual, worker: usual_piece([worker.capacity()]),
    "none": lambda _usual, _worker: Piece(),
}


def lengths_of(name: str) -> list[tuple[int, int]]:
    """Prompt and output tokens from which those of a load are drawn."""
    if name == "azure":
        rows = read_trace("azure-conversation")
        pairs = [(row.prompt_tokens, max(2, row.output_tokens)) for row in rows]
        return [pair for pair in pairs if pair[0] < 8192]
    if name == "lognormal":
        rng = np.random.default_rng(0)
        columns = [rng.lognormal(math.log(mean) - 0.32, 0.8, 2000) for mean in (2048, 200)]
        prompts, outputs = [column.round().clip(2, 8192).astype(int).tolist() for column in columns]
        return list(zip(prompts, outputs, strict=True))
    prompt, output = name.split("+")
    return [(int(prompt), int(output))]


def draw(lengths: Sequence[tuple[int, int]], rate: float, requests: int, seed: int) -> list[Asked]:
    """The requests of one draw."""
    rng = np.random.default_rng(seed)
    arrivals_s = rng.exponential(1 / rate, requests).cumsum().tolist()
    picked = rng.integers(len(lengths), size=requests).tolist()
    return [
        Asked(i.to_bytes(16, "big"), at_s, *lengths[pick])
        for i, (at_s, pick) in enumerate(zip(arrivals_s, picked, strict=True))
    ]


def figures(requests: Sequence[Asked]) -> list[float]:
    """Those of a line."""
    first_ms = [1e3 * (one.told_s[0] - one.at_s) for one in requests]
    second_ms = [1e3 * (one.told_s[1] - one.told_s[0]) for one in requests]
    later_s = [one.told_s[-1] - one.told_s[0] for one in requests]
    token_ms = [1e3 * s / (one.output_tokens - 1) for s, one in zip(later_s, requests, strict=True)]
    whole_ms = [1e3 * (one.told_s[-1] - one.at_s) for one in requests]
    same = [before.worker == after.worker for before, after in itertools.pairwise(requests)]
    tails = [float(np.percentile(some, q)) for some in (first_ms, token_ms) for q in (50, 99)]
    return [*tails, *(float(np.mean(some)) for some in (second_ms, whole_ms, same))]


def main() -> None:
    """Prints a line for each load and rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", nargs="+", default=["1024+256@24", "azure@20", "lognormal@10"])
    parser.add_argument("--rules", nargs="+", default=[*PIECES, "least_work"])
    parser.add_argument("--both", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--launch-ms", type=float, default=20.0)
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--requests", type=int, default=250)
    options = parser.parse_args()
    for load, rule in itertools.product(options.load, options.rules):
        name, _, rate = load.partition("@")
        vars(cost)["Usual"].piece = PIECES.get(rule, PIECES["cost"])
        found = []
        for seed in range(options.draws):
            requests = draw(lengths_of(name), float(rate), options.requests, seed)
            policy = cost.policy_of(rule if rule == "least_work" else "cost")
            Run(requests, policy, options)
            found.append(figures(requests))
        first, last, token, tokens, second, whole, same = np.median(found, axis=0).tolist()
        print(
            f"{load:14} {rule:10}  first {first:5.1f} / {last:5.1f}  second {second:4.1f}"
            f"  a token {token:5.2f} / {tokens:5.2f}  whole {whole:6.0f}  same worker {same:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
