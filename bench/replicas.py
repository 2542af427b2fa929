"""When first tokens come from workers that do both, by steps that take modelled times.

python -m bench.replicas [--load 1024+256@24 ...] [--launch-ms 27 27] [--chunk 192]
                         [--slow 1] [--draws 6] [--requests 250]

Nothing is computed, and time is virtual. The step loop and the scheduler of the engine run as they
are, one thread a worker, of which one runs at a time. A router's own routing and load estimates
place requests, by load reports ten times a second. The device takes for a step what an H200 takes
with an 8B model (constants below). The host needs a millisecond to launch a step that has a graph.
One with rows and more than a chunk of prompts has none: its host launches for `--launch-ms`, one
number for each worker, and the step lasts as long at least. `--slow 2`: in half of all
seconds, drawn for each worker, such launches take twice as long. `--chunk 0`: prompts are not cut
beside rows.

Loads: TOKENS+OUTPUT@RATE, `azure@RATE` (lengths of the Azure conversation trace, prompts below
8,192 tokens), `lognormal@RATE` (mean 2,048 tokens in and 200 out). Arrivals are random.

A line for each load, medians over the draws: ms to the first token (p50, p99), ms between tokens
(p50, p99), ms a token (p50 of requests), steps with prompts, the share of them with several.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from baton.worker.v1 import worker_pb2
from bench.virtual_time import Inbox, Launched, World
from console.loadgen.trace_files import read_trace
from engine.bounds import UNBOUNDED, Bounds
from engine.loop import rates, step_loop
from engine.loop.pacing import LaunchPacer
from engine.pages.blocks import BlockManager
from engine.sampling import Sampler
from engine.schedule.scheduler import Scheduler
from engine.step.plan import StepPlan
from engine.types import (
    Event,
    NewTokens,
    Request,
    SamplingParams,
    SequenceEnded,
    Sink,
    StopRules,
)
from router.jobs import Demand, ServedModel
from router.placement import routing
from router.placement.cost import Cost
from router.workers.load_estimate import Capacity, LoadEstimate
from worker.load import PrefillRoom, load_message

if TYPE_CHECKING:
    from router.workers.link import WorkerLink

MODEL = ServedModel("m", "r", "", 1 << 17, 1, (), 16)
SLOTS, STEP_TOKENS, PAGES, PAGE, VOCAB = 128, 2048, 20_000, 16, 32_000
STEP_S, ROW_S, CONTEXT_S = 4.05e-3, 30e-6, 34e-9
"""A step with rows, each row, and each token of their contexts: one row took 4.1 ms a token, and 25
rows of 1,150 tokens 5.8 to 6.1 (two H200, `bench/pd_beside.sh`, 2026-11-26)."""
PROMPT_TOKEN_S, PROMPT_CONTEXT_S = 20.8e-6, 1.25e-9
"""A token of a prompt, and more for each token before it: 1,024 tokens took 21.6 ms, 8,000 took 208
(the same runs)."""
BESIDE_S = 6e-3
"""A whole prompt beside rows, more than by itself."""
GRAPH_TOKENS, CHUNK_TOKEN_S = 192, 16e-6
"""Most prompt tokens of a step that has a graph, and what a token of them adds to it: chunks of 192
took 9.5 ms beside 6.4 without, those of 512 took 14.6 (bench/history/placement.md)."""
LAUNCH_S, TELL_S, REPORT_S, REPORT_LATE_S, PUMP_S = 0.8e-3, 1e-3, 0.1, 2e-3, 5e-3


class Step(NamedTuple):
    """What became of a step."""

    prompts: int
    began_s: float
    ended_s: float


class Device:
    """The executor of a worker."""

    def __init__(
        self, world: World, seed: int, launch_s: float, slow: float, graph_tokens: int
    ) -> None:
        self.steps: list[Step] = []
        self._graph_tokens = graph_tokens
        self._world, self._launch_s, self._slow, self._seed = world, launch_s, slow, seed
        self._noise = np.random.default_rng(seed)
        self._free_s = 0.0

    def launch(self, plan: StepPlan) -> Launched:
        """Takes the host's time. What is launched kernel by kernel begins with the first."""
        launched, now_s = Launched(len(plan.sample_slots)), self._world.now_s
        has_graph = not plan.num_decodes or plan.prompt_tokens <= self._graph_tokens
        lasts_s = step_s(plan, has_graph=has_graph) * float(self._noise.lognormal(0, 0.02))
        host_s, began_s = LAUNCH_S, max(now_s + LAUNCH_S, self._free_s)
        ended_s = began_s + lasts_s
        if not has_graph:
            host_s = self._launch_s * (self._slow if self._is_slow(now_s) else 1.0)
            ended_s = max(ended_s, now_s + host_s + 3e-4)
        self._free_s = ended_s
        self.steps.append(Step(len(plan.row_slots) - plan.num_decodes, began_s, ended_s))
        self._world.at(ended_s + 1e-4, launched.end)
        self._world.sleep(host_s)
        return launched

    def _is_slow(self, now_s: float) -> bool:
        return hashlib.sha256(f"{self._seed} {int(now_s)}".encode()).digest()[0] < 128


def step_s(plan: StepPlan, *, has_graph: bool) -> float:
    """Seconds that the device needs for a step."""
    rows, tokens = plan.num_decodes, plan.prompt_tokens
    rows_s = ROW_S * rows + CONTEXT_S * float(plan.context_lens[:rows].sum())
    if rows and has_graph:
        return STEP_S + rows_s + CHUNK_TOKEN_S * tokens
    new, behind = plan.query_lens[rows:], plan.context_lens[rows:] - plan.query_lens[rows:] / 2
    prompts_s = float((new * (PROMPT_TOKEN_S + PROMPT_CONTEXT_S * behind)).sum())
    return prompts_s + BESIDE_S + rows_s if rows else max(STEP_S, prompts_s)


class Worker:
    """A worker that does both: its step loop, and the router's link to it."""

    draining, page_bytes, decodes, prefills = False, 0, True, True
    complained_of = gave_up_on = measured = extensions = frozenset[str]()
    kind = int(worker_pb2.WORKER_ROLE_BOTH)
    fingerprint = "f"
    """See `WorkerLink`."""

    def __init__(self, world: World, device: Device, name: str, chunk: int) -> None:
        model = worker_pb2.ModelInfo(name="m", revision="r", fingerprint="f")
        role = worker_pb2.WORKER_ROLE_BOTH
        self.identity = worker_pb2.WorkerIdentity(worker_id=name, role=role, model=model)
        self.worker_id = self.agent_name = name
        self.device, self.loop = device, loop_of(world, device, chunk)
        self.estimate = LoadEstimate()
        self._world = world
        self._unknown: set[bytes] = set()
        self._report()
        world.start(self.loop._run)

    def capacity(self) -> Capacity:
        """See `WorkerLink`."""
        return self.estimate.capacity()

    def serves(self, _model: object) -> bool:
        """See `WorkerLink`."""
        return True

    def submit(self, request: Request, demand: Demand, sink: Sink) -> None:
        """A request is placed here."""
        part = routing.decode_reservation(demand)
        self.estimate.reserve(request.id, part._replace(prefill_tokens=demand.prompt_tokens))
        self._unknown.add(request.id)
        self._world.at(self._world.now_s + TELL_S, partial(self.loop.submit, request, sink))

    def _report(self) -> None:
        load = self.loop.load
        room = PrefillRoom(load.queued_prefill_tokens, ungranted=0, step=STEP_TOKENS, page=PAGE)
        message = load_message(load, room, draining=False)
        known = self._unknown & load.requests
        self._unknown -= known
        message.known_attempts.extend(known)
        self._world.at(self._world.now_s + REPORT_LATE_S, lambda: self.estimate.report(message))
        self._world.at(self._world.now_s + REPORT_S, self._report)


def loop_of(world: World, device: Device, chunk: int) -> step_loop.StepLoop:
    """The engine's loop, whose inbox is the world's. It is to be run by the world."""
    bounds = Bounds(
        max_sequences=SLOTS, max_step_tokens=STEP_TOKENS, mixed_prefill_tokens=chunk or UNBOUNDED,
        max_context_tokens=16_384, page_size=PAGE, eos_token_ids=frozenset({2}),
    )  # fmt: skip
    scheduler = Scheduler(bounds, BlockManager(PAGES), Sampler(SLOTS, VOCAB, "cpu", [2]))
    loop = step_loop.StepLoop(scheduler, cast("Any", device))
    vars(loop).update(_commands=Inbox(world), _pacer=LaunchPacer(world.monotonic))
    loop._publish_load()
    return loop


@contextmanager
def clock_of(world: World) -> Iterator[None]:
    """Engines have the world's clock meanwhile."""
    modules = vars(step_loop), vars(rates)
    for names in modules:
        names["time"] = world
    try:
        yield
    finally:
        for names in modules:
            names["time"] = time


class Run:
    """One draw: a router and its workers."""

    def __init__(
        self, lengths: Sequence[tuple[int, int]], rate: float, seed: int, options: Any
    ) -> None:
        self._world, self._rng = World(), np.random.default_rng(seed)
        self._policy = Cost()
        self._workers: list[Worker] = []
        self._waiting: deque[tuple[Request, Demand]] = deque()
        self._arrived_s: dict[bytes, float] = {}
        self._told_s: dict[bytes, list[float]] = {}
        self._left = options.requests
        with clock_of(self._world):
            self._run(lengths, rate, seed, options)

    def _run(
        self, lengths: Sequence[tuple[int, int]], rate: float, seed: int, options: Any
    ) -> None:
        graph_tokens = max(GRAPH_TOKENS, options.chunk)
        for i, ms in enumerate(options.launch_ms):
            device = Device(self._world, 16 * seed + i, ms / 1e3, options.slow, graph_tokens)
            self._workers.append(Worker(self._world, device, str(i), options.chunk))
        due_s = self._world.now_s + 0.5
        for number in range(options.requests):
            due_s += float(self._rng.exponential(1 / rate))
            pair = lengths[int(self._rng.integers(len(lengths)))]
            self._world.at(due_s, partial(self._arrive, number.to_bytes(16, "big"), *pair))
        self._pump_on()
        self._world.run(lambda: not self._left)

    def _arrive(self, name: bytes, tokens: int, output: int) -> None:
        ids = self._rng.integers(5, VOCAB, tokens).astype(np.int32)  # Nobody finds them cached.
        greedy, stop = SamplingParams(temperature=0.0), StopRules(output, ignore_eos=True)
        self._arrived_s[name], self._told_s[name] = self._world.now_s, []
        self._waiting.append((Request(name, ids, greedy, stop), Demand(MODEL, tokens, output, 1)))
        self._pump()

    def _pump_on(self) -> None:
        self._pump()
        self._world.at(self._world.now_s + PUMP_S, self._pump_on)

    def _pump(self) -> None:
        links = cast("list[WorkerLink]", self._workers)
        while self._waiting:
            request, demand = self._waiting[0]
            route = routing.choose(demand, links, self._policy, routing.Failed(), "cached")
            if route is None:
                return
            self._waiting.popleft()
            worker = self._workers[links.index(route.prefill)]
            worker.submit(request, demand, partial(self._hear, worker))

    def _hear(self, worker: Worker, events: Sequence[Event]) -> None:
        now_s = self._world.now_s
        for event in events:
            match event:
                case NewTokens():
                    for name in event.request_ids:
                        self._told_s[name].append(now_s)
                        if len(self._told_s[name]) == 1:
                            self._world.at(now_s + TELL_S, partial(worker.estimate.prefilled, name))
                case SequenceEnded():
                    self._left -= 1
                    release = partial(worker.estimate.release, event.request_id)
                    self._world.at(now_s + TELL_S, release)

    def figures(self) -> list[float]:
        """Figures of a line."""
        first = [told[0] - self._arrived_s[name] for name, told in self._told_s.items()]
        gaps = np.concatenate([np.diff(told) for told in self._told_s.values()])
        token = [(told[-1] - told[0]) / (len(told) - 1) for told in self._told_s.values()]
        tails = [np.percentile(some, q) for some in (first, gaps) for q in (50, 99)]
        steps = [step.prompts for worker in self._workers for step in worker.device.steps]
        some = [prompts for prompts in steps if prompts]
        ms = [1e3 * float(s) for s in (*tails, np.percentile(token, 50))]
        return [*ms, float(len(some)), float(np.mean([prompts > 1 for prompts in some]))]


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each load."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", nargs="+", default=["1024+256@24"])
    parser.add_argument("--launch-ms", nargs="+", type=float, default=[27.0, 27.0])
    parser.add_argument("--chunk", type=int, default=192)
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--requests", type=int, default=250)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # Of streams that wait in virtual time.
    for load in options.load:
        name, _, rate = load.partition("@")
        runs = [
            Run(lengths_of(name), float(rate), seed, options).figures()
            for seed in range(options.draws)
        ]
        first, last, gap, gaps, token, steps, several = np.median(runs, axis=0).tolist()
        print(
            f"{load:14} first {first:5.1f} / {last:5.1f}  between {gap:5.2f} / {gaps:4.1f}"
            f"  a token {token:5.2f}  steps {steps:4.0f}, with several {several:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
