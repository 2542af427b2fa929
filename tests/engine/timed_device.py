"""A device whose steps take as long as the test says, and a step loop over it."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from engine_fakes import VOCAB, HashExecutor

from engine.bounds import Bounds
from engine.loop.step_loop import OnStep, StepLoop
from engine.pages.blocks import BlockManager
from engine.sampling import Sampler
from engine.schedule.scheduler import Scheduler
from engine.step.plan import StepPlan, StepResult
from engine.types import Request, SamplingParams, StopRules

PAGES, PAGE_TOKENS, SLOTS = 400, 16, 64
STEP_S = 0.03
NONE = np.zeros(0, np.int32)


def plan(tokens: int, decodes: int) -> StepPlan:
    """Of so many tokens, `decodes` of them of rows that decode."""
    rows = np.zeros(tokens, np.int32)
    return StepPlan(
        0, rows, rows, rows, rows, rows, decodes, NONE, NONE, NONE, NONE, NONE, None,
        NONE, NONE, NONE, NONE,
    )  # fmt: skip


class TimedExecutor(HashExecutor):
    """Works through its steps one behind the other, each of which takes `step_s`."""

    def __init__(self) -> None:
        super().__init__(PAGES, PAGE_TOKENS, SLOTS)
        self.plans: list[StepPlan] = []
        self.began: list[float] = []
        self.step_s = STEP_S
        self._free_at = 0.0
        self._device = ThreadPoolExecutor(1)

    def launch(self, step: StepPlan) -> Future[StepResult]:
        begin = max(time.monotonic(), self._free_at)
        self._free_at = begin + self.step_s
        self.began.append(begin)
        self.plans.append(step)
        future: Future[StepResult] = Future()
        self._device.submit(self._work, step, future, self._free_at)
        return future

    def shutdown(self) -> None:
        self._device.shutdown()

    def _work(self, step: StepPlan, future: Future[StepResult], end: float) -> None:
        time.sleep(max(0.0, end - time.monotonic()))
        self._complete(step, future)


def running_loop(
    executor: TimedExecutor | None = None,
    mixed_prefill_tokens: int = 128,
    on_step: OnStep | None = None,
    **config_of: float,
) -> tuple[StepLoop, TimedExecutor]:
    """A loop over PAGES pages, for at most SLOTS sequences; steps of at most 128 tokens."""
    config = Bounds(
        max_sequences=SLOTS, max_step_tokens=SLOTS + 128, mixed_prefill_tokens=mixed_prefill_tokens,
        max_context_tokens=PAGES * PAGE_TOKENS, page_size=PAGE_TOKENS,
        eos_token_ids=frozenset(), **config_of,
    )  # fmt: skip
    sampler = Sampler(SLOTS, VOCAB, "cpu", [])
    executor = executor or TimedExecutor()
    loop = StepLoop(Scheduler(config, BlockManager(PAGES), sampler), executor)
    loop.start(on_step)
    return loop, executor


def submit(loop: StepLoop, number: int, output: int = 60, prompt: int = 5) -> None:
    ids = (np.arange(prompt, dtype=np.int32) + 7 * number) % VOCAB  # Nobody finds theirs cached.
    stop = StopRules(output, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0)
    request = Request(number.to_bytes(16, "big"), ids, greedy, stop)
    loop.post(lambda scheduler: scheduler.requests.submit(request, lambda _: None))
