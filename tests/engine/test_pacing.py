"""A step is launched shortly before the one in flight ends, with who arrived until then."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from engine_fakes import VOCAB, HashExecutor

from engine.blocks import BlockManager
from engine.bounds import SchedulerConfig
from engine.pacing import SLACK_S, LaunchPacer
from engine.sampling import Sampler
from engine.scheduler import Scheduler
from engine.step import StepPlan, StepResult
from engine.step_loop import StepLoop
from engine.types import Request, SamplingParams, StopRules

STEP_S = 0.03
NONE = np.zeros(0, np.int32)


def plan(tokens: int, decodes: int) -> StepPlan:
    rows = np.zeros(tokens, np.int32)
    return StepPlan(
        0, rows, rows, rows, rows, rows, decodes, NONE, NONE, NONE, NONE, NONE, None,
        NONE, NONE, NONE, NONE,
    )  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def paced(clock: Clock, steps_s: list[float], launch_s: float) -> LaunchPacer:
    pacer = LaunchPacer(clock)
    pacer.woke()
    clock.now += launch_s
    pacer.launched()
    for step_s in steps_s:
        pacer.settled(plan(4, 4), step_s)
    return pacer


def test_waits_until_two_launches_before_the_predicted_end(clock: Clock) -> None:
    pacer = paced(clock, [0.010, 0.012], launch_s=0.001)
    wait_s = pacer.wait_s(plan(4, 4), began=clock.now)
    assert wait_s == pytest.approx(0.010 - 0.002 - SLACK_S)


def test_nothing_is_waited_for_without_a_prediction(clock: Clock) -> None:
    assert paced(clock, [], 0.001).wait_s(plan(4, 4), clock.now) == 0
    assert paced(clock, [0.010], 0.001).wait_s(plan(4, 4), clock.now) == 0
    assert paced(clock, [0.010, 0.010], 0.001).wait_s(None, clock.now) == 0


def test_steps_with_prompts_are_neither_waited_for_nor_learnt_from(clock: Clock) -> None:
    pacer = paced(clock, [0.010, 0.010], 0.001)
    assert pacer.wait_s(plan(64, 4), clock.now) == 0
    pacer.settled(plan(64, 4), 5.0)
    pacer.settled(plan(64, 4), 5.0)
    assert pacer.wait_s(plan(4, 4), clock.now) < 0.010


def test_a_step_shorter_than_two_launches_is_not_waited_for(clock: Clock) -> None:
    assert paced(clock, [0.002, 0.002], launch_s=0.001).wait_s(plan(4, 4), clock.now) == 0


def test_one_slow_launch_is_remembered_for_a_while(clock: Clock) -> None:
    pacer = paced(clock, [0.010, 0.010], launch_s=0.004)
    before = pacer.wait_s(plan(4, 4), clock.now)
    for _ in range(100):
        pacer.woke()
        pacer.launched()
    assert pacer.wait_s(plan(4, 4), clock.now) > before + 0.007


class TimedExecutor(HashExecutor):
    """Works through its steps one behind the other, each of which takes STEP_S."""

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.plans: list[StepPlan] = []
        self.began: list[float] = []
        self._free_at = 0.0

    def launch(self, step: StepPlan) -> Future[StepResult]:
        begin = max(time.monotonic(), self._free_at)
        self._free_at = begin + STEP_S
        self.plans.append(step)
        self.began.append(begin)
        future: Future[StepResult] = Future()
        threading.Timer(self._free_at - time.monotonic(), self._complete, (step, future)).start()
        return future


def test_who_arrives_during_a_step_is_in_the_next_one() -> None:
    """Launched at once instead, the next step would leave without them, and this would say 1."""
    config = SchedulerConfig(
        max_sequences=64, max_step_tokens=128, mixed_prefill_tokens=128, max_context_tokens=512,
        page_size=16, eos_token_ids=frozenset(),
    )  # fmt: skip
    sampler = Sampler(64, VOCAB, "cpu", [])
    executor = TimedExecutor(400, 16, 64)
    loop = StepLoop(Scheduler(config, BlockManager(400), sampler), executor)
    loop.start()
    ids, greedy = np.arange(3, 8, dtype=np.int32), SamplingParams(temperature=0.0)

    def submit(number: int) -> None:
        request = Request(number.to_bytes(16, "big"), ids, greedy, StopRules(60, ignore_eos=True))
        loop.post(lambda scheduler: scheduler.submit(request, lambda _: None))

    submit(0)
    time.sleep(6 * STEP_S)
    steps_waited = []
    for number in range(1, 12):
        arrived = time.monotonic()
        submit(number)
        time.sleep(4.4 * STEP_S)
        joined = next(
            i
            for i, step in enumerate(executor.plans)
            if executor.began[i] > arrived and step.num_tokens > step.num_decodes
        )
        running = sum(began <= arrived for began in executor.began)
        steps_waited.append(joined - running)
    loop.stop()
    assert sorted(steps_waited)[len(steps_waited) // 2] == 0, steps_waited
