"""Goodput under overload: how many requests a second are whole by their deadline.

python -m bench.overload [--load chat azure] [--factor 2 5 20] [--seconds 120] [--draws 3]
                         [--deadline 10] [--shared 0] [--noise 0] [--cold] [--rule shipped ...]
                         [--json FILE]

The router's own dispatcher (`router.dispatch`) runs on a virtual clock, and nothing is computed. A
scripted worker that does both computes prompts one after the other and decodes `SLOTS` sequences at
a fixed pace. The capacity is what a closed loop of 1.5 x `SLOTS` clients without deadlines gets
done. Then requests come at random, at a multiple of it, each with the same deadline. Last they come
at 0.6 of it, from one moment to the next.

Loads: `chat` (20 to 80 tokens in, 16 out, as in the attack that this was found with) and `azure`
(lengths of the Azure conversation trace, an eighth of each; clients do not say how long the output
will be).

A line for each case, medians over the draws: the goodput in parts of the capacity, the share of all
requests and of those not refused that ended with DEADLINE_EXCEEDED, the share that was refused, how
long a refusal took at p99, the same goodput and share in the 30 s behind the overload.

`--shared`: the part of a token's time that is due to those that run beside it, at all slots.

`--noise`: how far the pace of an answer is from the mean: the standard deviation of its logarithm.

`--cold`: a router that has seen no request before is overloaded, with no closed loop in front.

Rules: `shipped`; `nothing` refuses nobody for a deadline; `queue` refuses where the wait alone is
too long; `once` counts the wait and the service, each as estimated; `mean` counts a service without
what estimates were off; `level 0`, `level 1` and `level 4` stand for `LEVEL` of the pace.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import selectors
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from unittest import mock

import numpy as np
from opentelemetry.context import Context

from baton.worker.v1 import worker_pb2
from bench.harness import write_json
from console.loadgen.trace_files import read_trace
from router.dispatch import pace as pace_module
from router.dispatch.dispatcher import JobDispatcher
from router.dispatch.pace import Pace
from router.errors import RouterError
from router.jobs import Job, ServedModel
from router.settings import RouterSettings
from router.workers.load_estimate import Capacity, LoadEstimate
from serving.wire import pack_ids

if TYPE_CHECKING:
    from router.jobs import Demand
    from router.workers.link import WorkerLink

SLOTS = 16
PROMPT_TOKEN_S, OUTPUT_TOKEN_S = 100e-6, 0.1
"""Rate of a small machine: one sequence gets ten tokens a second."""
CREDIT_TOKENS, REPORT_S = 8192, 0.1
MODEL = ServedModel("m", "r", "/m", 1 << 17, 1000, (), 16)
CHAT = [(tokens, 16) for tokens in range(20, 80)]


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer, instead of waiting for it."""

    def __init__(self) -> None:
        self.now_s = 1e6
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Seconds."""
        return self.now_s

    def time_ns(self) -> int:
        """Nanoseconds."""
        return round(self.now_s * 1e9)


class _Jump(selectors.DefaultSelector):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        self._clock.now_s += max(0.0, timeout or 0.0)
        return super().select(0)


class Worker:
    """A scripted worker, and the router's link to it."""

    shared = 0.0
    """Part of a token's time that grows with the sequences beside it."""
    noise = 0.0
    """Standard deviation of the logarithm of an answer's pace."""
    draining = False
    kind, model = 0, ("m", "r")
    adapters: Final[Mapping[str, bytes]] = {}
    prefills = decodes = True
    """See `WorkerLink`."""
    role = worker_pb2.WORKER_ROLE_BOTH
    worker_id = agent_name = "w"

    def __init__(self, dispatcher: JobDispatcher) -> None:
        model = worker_pb2.ModelInfo(name="m", revision="r", fingerprint="f")
        self.identity = worker_pb2.WorkerIdentity(worker_id="w", role=self.role, model=model)
        self.estimate = LoadEstimate()
        self.was_slept_through = False
        self._dispatcher = dispatcher
        self._prompts: deque[worker_pb2.Submit] = deque()
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._unreported: list[bytes] = []
        self._rng = np.random.default_rng(0)
        self._came = asyncio.Event()
        self._tasks = [
            asyncio.create_task(self._compute()),
            asyncio.create_task(self._send_reports()),
        ]
        self._report()

    def capacity(self) -> Capacity:
        """See `WorkerLink`."""
        return self.estimate.capacity()

    def avoids(self, _other: object) -> bool:
        """See `WorkerLink`."""
        return False

    def serves(self, _model: object) -> bool:
        """See `WorkerLink`."""
        return True

    complained_of = gave_up_on = extensions = frozenset[str]()
    fingerprint = "f"
    """See `WorkerLink`."""

    def send(self, message: worker_pb2.WorkRequest) -> None:
        """Takes what the dispatcher says."""
        if message.WhichOneof("message") == "submit":
            self._prompts.append(message.submit)
            self._unreported.append(message.submit.attempt_id)
            self._came.set()
        elif message.WhichOneof("message") == "cancel":
            attempt_id = message.cancel.attempt_id
            self._prompts = deque(p for p in self._prompts if p.attempt_id != attempt_id)
            if (task := self._running.pop(attempt_id, None)) is not None:
                task.cancel()

    def stop(self) -> None:
        """Ends it."""
        for task in [*self._tasks, *self._running.values()]:
            task.cancel()

    async def _compute(self) -> None:
        """Prompts one after the other; a prompt's first token comes with its last step."""
        while True:
            while not self._prompts:
                self._came.clear()
                await self._came.wait()
            prompt = self._prompts.popleft()
            self._running[prompt.attempt_id] = asyncio.create_task(self._decode(prompt))
            await asyncio.sleep(len(prompt.prompt_ids) / 4 * PROMPT_TOKEN_S)

    async def _decode(self, prompt: worker_pb2.Submit) -> None:
        attempt_id, wanted = prompt.attempt_id, prompt.sampling.seed
        token_s = OUTPUT_TOKEN_S * self._rng.lognormal(-(self.noise**2) / 2, self.noise)
        await asyncio.sleep(len(prompt.prompt_ids) / 4 * PROMPT_TOKEN_S)
        for index in range(wanted):
            tokens = worker_pb2.Tokens(
                attempt_ids=[attempt_id],
                choice_indices=pack_ids([0]),
                indices=pack_ids([index]),
                token_ids=pack_ids([1]),
            )
            self._say(tokens=tokens)
            if index < wanted - 1:
                beside = self.shared * len(self._running) / SLOTS
                await asyncio.sleep(token_s * (1 - self.shared + beside))
        self._running.pop(attempt_id)
        reason = worker_pb2.END_REASON_LENGTH
        finished = worker_pb2.Finished(attempt_id=attempt_id, output_tokens=wanted, reason=reason)
        self._say(finished=finished)

    async def _send_reports(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._report()

    def _report(self) -> None:
        queued = sum(len(prompt.prompt_ids) // 4 for prompt in self._prompts)
        load = worker_pb2.Load(
            queued_prefill_tokens=queued,
            prefill_credit_tokens=CREDIT_TOKENS - queued,
            running_sequences=len(self._running) + len(self._prompts),
            max_sequences=SLOTS,
            total_pages=1 << 20,
            free_pages=1 << 20,
            known_attempts=self._unreported,
        )
        self._unreported = []
        self.estimate.report(load)
        self._dispatcher.loaded(cast("WorkerLink", self))

    def _say(self, **message: Any) -> None:
        self._dispatcher.received(cast("WorkerLink", self), worker_pb2.WorkResponse(**message))


@dataclass
class Seen:
    """What became of the requests of a phase."""

    began_s: float
    sent: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)

    def rate(self, seconds: float) -> float:
        """Whole answers a second."""
        return self.ends["OK"] / seconds


class Router:
    """The dispatcher and its worker, and clients in front of them."""

    def __init__(self, lengths: Sequence[tuple[int, int]], seed: int) -> None:
        self._lengths = lengths
        self._sends_length = lengths is CHAT
        self._rng = np.random.default_rng(seed)
        self._ids = itertools.count()
        self.dispatcher = JobDispatcher(RouterSettings(name="router"))
        self.worker = Worker(self.dispatcher)
        self.dispatcher.attached(cast("WorkerLink", self.worker))

    async def closed(self, seconds: float) -> float:
        """Capacity, requests a second; the first half of the time warms it up."""
        seen = Seen(0)
        ends_s = now_s() + 1.5 * seconds

        async def client() -> None:
            while now_s() < ends_s:
                await self.one(seen, 1e4)

        clients = [asyncio.create_task(client()) for _ in range(SLOTS * 3 // 2)]
        await asyncio.sleep(0.5 * seconds)
        before = seen.ends["OK"]
        await asyncio.sleep(seconds)
        done = seen.ends["OK"] - before
        await asyncio.wait(clients)
        return done / seconds

    async def phase(self, rate: float, seconds: float, deadline_s: float) -> Seen:
        """Requests that come at random; returns when the time is up and every one has ended."""
        seen, tasks = Seen(now_s()), set()
        due_s = now_s()
        while (due_s := due_s + self._rng.exponential(1 / rate)) < seen.began_s + seconds:
            await asyncio.sleep(due_s - now_s())
            task = asyncio.create_task(self.one(seen, deadline_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        self._open = tasks
        return seen

    async def one(self, seen: Seen, deadline_s: float) -> None:
        """One request, cancelled at its deadline as the front door does."""
        began_s = now_s()
        seen.sent += 1
        try:
            async with asyncio.timeout(deadline_s):
                await self.dispatcher.run(self._job(deadline_s), lambda event: None)
            seen.ends["OK"] += 1
        except RouterError as error:
            seen.ends[error.reason] += 1
            seen.refused_s.append(now_s() - began_s)
        except TimeoutError:
            seen.ends["DEADLINE_EXCEEDED"] += 1

    def _job(self, deadline_s: float) -> Job:
        prompt, output = self._lengths[int(self._rng.integers(len(self._lengths)))]
        call = f"{next(self._ids):032x}"
        now_ns = time.time_ns()
        return Job(
            id=call,
            model=MODEL,
            prompt_ids=np.zeros(prompt, np.uint32),
            # The worker gets the length of the output where no other worker reads it.
            sampling=worker_pb2.Sampling(seed=output),
            stopping=worker_pb2.Stopping(max_tokens=output if self._sends_length else 1024),
            choices=1,
            arrived_ns=now_ns,
            deadline_ns=now_ns + round(deadline_s * 1e9),
            context=Context(),
            holder=call,
        )


def now_s() -> float:
    """On the virtual clock."""
    return asyncio.get_running_loop().time()


async def overload(
    lengths: Sequence[tuple[int, int]],
    factor: float,
    seconds: float,
    deadline_s: float,
    seed: int,
    cold: bool,
) -> dict[str, float]:
    """The figures of one draw."""
    warm = Router(lengths, seed)
    capacity = await warm.closed(seconds)
    if cold:
        warm.worker.stop()
    router = Router(lengths, seed) if cold else warm
    during = await router.phase(factor * capacity, seconds, deadline_s)
    after = await router.phase(0.6 * capacity, 30, deadline_s)
    await asyncio.sleep(deadline_s + 1)
    router.worker.stop()
    return {
        "capacity": capacity,
        "good": during.rate(seconds) / capacity,
        "late": during.ends["DEADLINE_EXCEEDED"] / during.sent,
        "late_of_taken": during.ends["DEADLINE_EXCEEDED"]
        / max(1, during.sent - len(during.refused_s)),
        "refused": len(during.refused_s) / during.sent,
        "refused_p99_s": float(np.percentile(during.refused_s or [0.0], 99)),
        "good_after": after.rate(30) / (after.sent / 30),
        "late_after": after.ends["DEADLINE_EXCEEDED"] / after.sent,
    }


@contextmanager
def rule(name: str) -> Iterator[None]:
    """Sets how deadlines are judged."""

    def wait_alone(pace: Pace, demand: Demand, wait_s: float) -> float:
        return wait_s

    def once(pace: Pace, demand: Demand, wait_s: float) -> float:
        return wait_s + pace.service_s(demand, max(1, pace.running))

    patches: dict[str, list[tuple[Any, str, object]]] = {
        "shipped": [],
        "nothing": [(Pace, "needed_s", lambda *_: 0.0)],
        "queue": [(Pace, "needed_s", wait_alone)],
        "once": [(Pace, "needed_s", once)],
        "mean": [(Pace, "surely_s", Pace.service_s)],
        **{f"level {level}": [(pace_module, "LEVEL", level)] for level in (0, 1, 4)},
    }
    running = [mock.patch.object(*patch) for patch in patches[name]]
    for one in running:
        one.start()
    try:
        yield
    finally:
        for one in running:
            one.stop()


def run(*arguments: Any) -> dict[str, float]:
    """`overload` on a clock of its own."""
    clock = Clock()
    with (
        mock.patch.object(time, "monotonic", clock.time),
        mock.patch.object(time, "time_ns", clock.time_ns),
        asyncio.Runner(loop_factory=lambda: clock) as runner,
    ):
        return runner.run(overload(*arguments))


def lengths_of(name: str) -> Sequence[tuple[int, int]]:
    """Tokens in and out that a load's requests are drawn from."""
    if name == "chat":
        return CHAT
    rows = read_trace("azure-conversation")
    return [(max(1, row.prompt_tokens // 8), max(1, row.output_tokens // 8)) for row in rows]


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--load", nargs="+", default=["chat", "azure"], choices=["chat", "azure"])
    parser.add_argument("--factor", nargs="+", type=float, default=[2, 5, 20])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=10)
    parser.add_argument("--rule", nargs="+", default=["shipped"])
    parser.add_argument("--shared", type=float, default=0.0)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    Worker.shared, Worker.noise = arguments.shared, arguments.noise
    found = []
    for load, factor, name in itertools.product(arguments.load, arguments.factor, arguments.rule):
        with rule(name):
            draws = [
                run(
                    lengths_of(load),
                    factor,
                    arguments.seconds,
                    arguments.deadline,
                    seed,
                    arguments.cold,
                )
                for seed in range(arguments.draws)
            ]
        figures = {key: statistics.median(draw[key] for draw in draws) for key in draws[0]}
        cells = "  ".join(f"{key} {value:.3f}" for key, value in figures.items())
        print(f"{load:6} x {factor:<4g} {name:12} {cells}", flush=True)
        found.append({"load": load, "factor": factor, "rule": name, **figures})
    write_json(arguments.json, found)


if __name__ == "__main__":
    main()
