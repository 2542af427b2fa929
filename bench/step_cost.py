"""What one decode step costs the CPUs beside the device's own work: nothing is computed.

python -m bench.step_cost [--sequences 256] [--steps 1000]

The scheduler, a worker's decode service, its outbox and the router's dispatcher run as they do in
their processes, joined without gRPC, on one thread. CPU time of that thread per step:

    plan, settle    the step loop's thread, events handed out included
    worker          the worker's event loop: from the engine's events to the message's bytes
    router          the router's event loop: from the message's bytes to each request's own queue
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from opentelemetry.context import Context

from baton.worker.v1 import worker_pb2
from decode_service.service import DecodeService
from engine.bounds import Bounds
from engine.loop.sinks import hand_out
from engine.pages.blocks import BlockManager
from engine.sampling import Sampler
from engine.schedule.scheduler import Scheduler
from engine.step.executor import Launched
from engine.step.plan import StepPlan, StepResult
from engine.step.sampling import Masks
from engine.types import EngineLoad
from kv_transfer.events import TransferCounters
from kv_transfer.specs import ReceiveSpec
from kv_transfer.types import PageGroup
from router.dispatch.dispatcher import JobDispatcher
from router.jobs import Job, JobEvent, JobTokens, ServedModel
from router.settings import RouterSettings
from router.workers.link import WorkerLink
from telemetry.metrics.worker import WorkerMetrics
from worker_base.outbox import Action, Outbox
from worker_base.page_layout import PageLayout

PROMPT, PAGE_SIZE, VOCAB = 32, 16, 128_256
BLOCK = 50
"""Steps that one part runs through before the next takes over, as processes of their own would."""
T = TypeVar("T")


class NullExecutor:
    """Computes nothing: every token is 0."""

    def shaped(self, plan: StepPlan) -> StepPlan:
        """Nothing to decide."""
        return plan

    def launch(self, plan: StepPlan) -> Launched:
        """A step that is done already."""
        count = len(plan.sample_slots)
        done: Future[StepResult] = Future()
        done.set_result(
            StepResult(np.zeros(count, np.int32), np.ones(count, np.bool_), None, None, None)
        )
        return done

    def mask_bits(self, count: int) -> NDArray[np.int32]:
        """Masks of one word."""
        return np.zeros((count, 1), np.int32)

    def sample(self, masks: Masks | None) -> None:
        """Nothing to draw."""

    def shutdown(self) -> None:
        """Nothing to stop."""


class Engine:
    """The scheduler, with an executor that computes nothing. Also the transfers: there are none."""

    def __init__(self, sequences: int, steps: int) -> None:
        config = Bounds(
            max_sequences=sequences,
            max_step_tokens=64 * sequences,
            mixed_prefill_tokens=64 * sequences,
            max_context_tokens=2 * steps + 64,
            page_size=PAGE_SIZE,
            eos_token_ids=frozenset({2}),
        )
        blocks = BlockManager(sequences * (steps + 64) // 8)
        self.scheduler = Scheduler(config, blocks, Sampler(sequences, VOCAB, "cpu", [2]))
        self.submit = self.scheduler.requests.submit
        self.deliver = self.scheduler.requests.deliver
        self.cancel = self.scheduler.requests.cancel
        self.release = self.scheduler.requests.release
        self._executor = NullExecutor()
        self._previous: StepPlan | None = None

    def expect(self, spec: ReceiveSpec) -> None:
        """Never called."""

    def abort_receive(self, transfer_id: bytes) -> None:
        """Never called."""

    def rank_skew_s(self, start_ns: int, end_ns: int) -> float:
        """There is one rank."""
        return 0.0

    def plan(self) -> StepPlan | None:
        """Admits and plans."""
        self.scheduler.admission.admit()
        return self.scheduler.planner.plan()

    def settle(self, plan: StepPlan | None) -> None:
        """Settles the step before `plan` and hands its events out."""
        if self._previous is not None:
            self.scheduler.settler.settle(
                self._previous, self._executor.launch(self._previous).result()
            )
            hand_out(self.scheduler.requests.take_events())
        self.scheduler.requests.publish_delivered()
        self._previous = plan


class Worker:
    """The decode service over that engine, and one router's outbox."""

    def __init__(self, engine: Engine) -> None:
        self._actions: deque[Action] = deque()
        self._outbox = Outbox(on_overflow=self._overflowed)
        stand_in: Any = engine  # for the engine and for the transfer thread
        self.service = DecodeService(
            stand_in,
            stand_in,
            self._actions.append,
            WorkerMetrics(EngineLoad, TransferCounters),
            epoch=1,
            agent_name="d",
            layout=PageLayout(1, (PageGroup(1, 1 << 30),)),
            max_bytes_per_peer=1 << 30,
        )

    def submit(self, submit: worker_pb2.Submit) -> None:
        """As if it had come over the stream."""
        self.service.submit(submit, self._outbox)

    def send(self) -> list[bytes]:
        """What the router is sent of a step."""
        if self._actions:
            self._actions.popleft()()
        messages = []
        while len(self._outbox):
            coroutine = self._outbox.get()
            try:
                coroutine.send(None)
            except StopIteration as got:
                messages.append(got.value.SerializeToString())
        return messages

    def _overflowed(self) -> None:
        raise RuntimeError("nobody reads the outbox")


class Link(WorkerLink):
    """The router's end: what it sends arrives at once."""

    def __init__(self, worker: Worker, dispatcher: JobDispatcher, load: worker_pb2.Load) -> None:
        model = worker_pb2.ModelInfo(name="m", page_size_tokens=PAGE_SIZE, max_context_tokens=9999)
        identity = worker_pb2.WorkerIdentity(
            worker_id="d", role=worker_pb2.WORKER_ROLE_BOTH, model=model
        )
        self._worker = worker
        super().__init__(identity, "r", dispatcher, stale_after_s=60, attach_timeout_s=60)
        self.estimate.report(load)

    def send(self, message: worker_pb2.WorkRequest) -> None:
        """Hands a Submit over; nothing else matters here."""
        if message.HasField("submit"):
            self._worker.submit(message.submit)


async def read(dispatcher: JobDispatcher, job: Job, counts: list[int]) -> None:
    """A front door that only counts."""

    def count(event: JobEvent) -> None:
        counts[0] += isinstance(event, JobTokens)

    await dispatcher.run(job, count)


async def measure(sequences: int, steps: int) -> dict[str, list[float]]:
    """Seconds of CPU per step, by part."""
    engine = Engine(sequences, steps)
    worker, dispatcher = Worker(engine), JobDispatcher(RouterSettings())
    load = worker_pb2.Load(
        progress=1,
        max_sequences=sequences,
        free_pages=1 << 20,
        total_pages=1 << 20,
        prefill_credit_tokens=1 << 20,
    )
    link, counts = Link(worker, dispatcher, load), [0]
    dispatcher.attached(link)
    readers = [
        asyncio.create_task(read(dispatcher, a_job(2 * steps), counts)) for _ in range(sequences)
    ]
    await asyncio.sleep(0)
    spent: dict[str, list[float]] = {"plan": [], "settle": [], "worker": [], "router": []}
    for _ in range(steps // BLOCK):
        for _ in range(BLOCK):
            plan = timed(spent["plan"], engine.plan)
            timed(spent["settle"], partial(engine.settle, plan))
        sent = [timed(spent["worker"], worker.send) for _ in range(BLOCK)]
        for messages in sent:
            timed(spent["router"], partial(receive, dispatcher, link, messages))
        await asyncio.sleep(0)
    assert counts[0] == sequences * (steps // BLOCK * BLOCK - 1), "a token was lost"
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return {part: series[BLOCK:] for part, series in spent.items()}


def a_job(max_tokens: int) -> Job:
    """A request that outlasts the measurement."""
    return Job(
        id="0" * 32,
        model=ServedModel("m", "", "", 9999, VOCAB, (2,), PAGE_SIZE),
        prompt_ids=np.full(PROMPT, 7, np.uint32),
        sampling=worker_pb2.Sampling(top_p=1, repetition_penalty=1),
        stopping=worker_pb2.Stopping(max_tokens=max_tokens),
        choices=1,
        arrived_ns=time.time_ns(),
        deadline_ns=time.time_ns() + 10**12,
        context=Context(),
    )


def receive(dispatcher: JobDispatcher, link: Link, messages: list[bytes]) -> None:
    """What the router does with a step's messages."""
    for message in messages:
        dispatcher.received(link, worker_pb2.WorkResponse.FromString(message))


def timed(series: list[float], call: Callable[[], T]) -> T:
    """Adds the CPU seconds of a call."""
    began = time.thread_time()
    answer = call()
    series.append(time.thread_time() - began)
    return answer


def main() -> None:
    """Prints least, median and 99th percentile in milliseconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    spent = asyncio.run(measure(arguments.sequences, arguments.steps))
    both = [a + b for a, b in zip(spent["plan"], spent["settle"], strict=True)]
    for part, series in {**spent, "plan + settle": both}.items():
        least, p50 = min(series), statistics.median(series)
        p99 = statistics.quantiles(series, n=100)[98]
        print(f"{part:13} min {least * 1e3:.3f}  p50 {p50 * 1e3:.3f}  p99 {p99 * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
