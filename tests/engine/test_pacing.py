"""A step is launched shortly before the one in flight ends, with who arrived until then."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from timed_device import STEP_S, TimedExecutor, plan, running_loop, submit
from waiting import WAIT_S, wait_until

from engine.loop.pacing import IDLE_SHARE, LEARNT, NEARLY, LaunchPacer
from engine.step.plan import StepPlan, StepResult
from engine.types import Mode, Request, SamplingParams, StopRules

TRIES = 5


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def paced(clock: Clock, steps_s: list[float]) -> LaunchPacer:
    pacer = LaunchPacer(clock)
    for step_s in steps_s:
        pacer.settled(plan(4, 4), step_s)
    return pacer


def test_waits_until_the_predicted_end(clock: Clock) -> None:
    wait_s = paced(clock, [0.010, 0.012]).wait_s(plan(4, 4), clock.now - 0.001, 0.0)
    assert wait_s == pytest.approx(0.009)


def test_nothing_is_waited_for_without_a_prediction(clock: Clock) -> None:
    assert paced(clock, []).wait_s(plan(4, 4), clock.now, 0.0) == 0
    assert paced(clock, [0.010]).wait_s(plan(4, 4), clock.now, 0.0) == 0


def test_a_step_with_prompts_is_predicted_by_their_rate_alone(clock: Clock) -> None:
    pacer = paced(clock, [0.010, 0.010])
    assert pacer.wait_s(plan(64, 4), clock.now, 0.0) == 0
    assert pacer.wait_s(plan(64, 4), clock.now, 0.02) == pytest.approx(NEARLY * 0.02)
    pacer.settled(plan(64, 4), 5.0)
    pacer.settled(plan(64, 4), 5.0)
    assert pacer.wait_s(plan(4, 4), clock.now, 0.0) == pytest.approx(0.010)


def test_a_launch_as_long_as_a_step_is_not_waited_with(clock: Clock) -> None:
    pacer = paced(clock, [0.001, 0.001])
    for _ in range(20):
        pacer.settled(plan(4, 4), 0.001, idle_s=0.001)
    assert pacer.wait_s(plan(4, 4), clock.now, 0.0) == 0


@dataclass
class Device:
    """A device that decodes, whose host launches as the pacer says, all by one clock. Requests come
    at any time, and join the step that is prepared next."""

    outliers: float
    """Share of the launches that take 3 ms."""
    offers: bool = False
    """Whether they join the step that is launched, until shortly before it begins."""
    steps: int = 4000

    def run(self) -> Device:
        clock, draw = Clock(), random.Random(1)
        self.pacer = LaunchPacer(clock)
        self.gaps_s: list[float] = []
        self.leads_s: list[float] = []
        self.idle_s, ended, began = 0.0, clock.now, clock.now
        for step in range(self.steps):
            known = step > 3
            clock.now += self.pacer.wait_s(plan(4, 4), began, 0.0)
            prepared, came = clock.now, (self.woke if step else clock.now)
            slow = known and draw.random() < self.outliers
            clock.now += 3e-3 if slow else draw.uniform(0.7e-3, 1.0e-3)
            self.leads_s.append(self.pacer.lead_s)
            idle_s, before_s = max(0.0, clock.now - ended), ended - began
            began = max(clock.now, ended)
            self.woke = max(prepared, began - OFFER_S) if self.offers else prepared
            clock.now = max(clock.now, ended)
            if step:
                self.pacer.settled(plan(4, 4), before_s, idle_s)
                self.idle_s += idle_s
            ended = began + REAL_STEP_S + draw.uniform(0, 5e-5)
            some = known and draw.random() * REAL_STEP_S < self.woke - came
            self.gaps_s += [ended - draw.uniform(came, self.woke)] if some else []
        return self


REAL_STEP_S = 6.4e-3
NEAR_S = 3e-4
OFFER_S = 2.5e-4
"""A row is offered in so long."""


def modelled_gap_s(lead_s: float) -> float:
    """Half a step until one is prepared, the lead, and that step."""
    return REAL_STEP_S / 2 + lead_s + REAL_STEP_S


@pytest.mark.parametrize(
    ("outliers", "lead_ms"), [(0.0, 1.1), (1 / 150, 1.2), (1 / 27, 1.7)], ids=str
)
def test_a_request_waits_for_half_a_step_and_the_lead(outliers: float, lead_ms: float) -> None:
    """With the longest launch, twice and slowly forgotten, the last lead is 4 ms and more."""
    device = Device(outliers).run()
    lead_s = float(np.mean(device.leads_s))
    assert lead_s < lead_ms * 1e-3
    assert np.median(device.gaps_s) == pytest.approx(modelled_gap_s(lead_s), abs=NEAR_S)
    assert device.idle_s < (IDLE_SHARE + 0.003) * device.steps * REAL_STEP_S


@pytest.mark.parametrize("outliers", [0.0, 1 / 150, 1 / 27], ids=str)
def test_a_request_that_may_come_late_waits_for_half_a_step_alone(outliers: float) -> None:
    """Whatever the lead is. Without, it waits for the lead, too."""
    device = Device(outliers, offers=True).run()
    waits_s = REAL_STEP_S / 2 + OFFER_S + REAL_STEP_S
    assert np.median(device.gaps_s) == pytest.approx(waits_s, abs=NEAR_S)
    gain_s = float(np.median(Device(outliers).run().gaps_s)) - waits_s
    assert gain_s > 0.5 * float(np.mean(device.leads_s))


def test_a_device_that_runs_dry_makes_the_lead_longer_for_a_while(clock: Clock) -> None:
    pacer = paced(clock, [0.010, 0.010])
    pacer.settled(plan(4, 4), 0.010, idle_s=0.002)
    lead_s = pacer.lead_s
    assert lead_s == pytest.approx(LEARNT * (0.002 - IDLE_SHARE * 0.010))
    pacer.settled(plan(4, 4), 0.010, idle_s=-0.009)
    assert pacer.lead_s == pytest.approx(lead_s - LEARNT * IDLE_SHARE * 0.010), "it was early"
    for _ in range(30):
        pacer.settled(plan(4, 4), 0.010)
    assert pacer.lead_s == 0


def test_one_pause_of_the_host_is_no_reason_to_launch_early(clock: Clock) -> None:
    pacer = paced(clock, [0.010, 0.010])
    pacer.settled(plan(4, 4), 0.010, idle_s=3.0)
    assert pacer.lead_s < 0.001


def began_after(executor: TimedExecutor, arrived: float) -> int | None:
    """The first step with a prompt that began after that."""
    for i, step in enumerate(executor.plans):
        if executor.began[i] > arrived and step.num_tokens > step.num_decodes:
            return i
    return None


def test_a_few_slow_steps_do_not_slow_all_that_follow() -> None:
    """Each of them would seem to have taken as long as it was waited for."""
    loop, executor = running_loop()
    executor.step_s = 0.2
    submit(loop, 0, output=45)
    while len(executor.plans) < 5:
        time.sleep(0.01)
    executor.step_s = 0.001
    deadline = time.monotonic() + 6
    while loop.load.tokens_sampled < 45 and time.monotonic() < deadline:
        time.sleep(0.01)
    loop.stop()
    assert loop.load.tokens_sampled == 45, "40 steps of 1 ms; at the old pace they take 8 s"


def test_a_step_that_ends_early_is_noticed_at_once() -> None:
    """Its end is posted: nothing sleeps through it until the predicted time."""
    loop, executor = running_loop()
    executor.step_s = 0.5
    submit(loop, 0, output=30)
    wait_until(lambda: len(executor.plans) > 4)
    executor.step_s = 0.01
    wait_until(lambda: executor.plans[-1].number > 6)
    began = list(executor.began)
    loop.stop()
    first_short = next(i for i in range(5, len(began)) if began[i] - began[i - 1] < 0.25)
    gaps_s = [after - before for before, after in pairwise(began[first_short:])]
    assert max(gaps_s, default=0.0) < 0.25, gaps_s


class SlowLaunch(TimedExecutor):
    """To launch a step with a prompt takes the host nearly as long as the step takes, and longer
    than the step before it goes on."""

    def launch(self, step: StepPlan) -> Future[StepResult]:
        future = super().launch(step)
        if step.num_tokens > step.num_decodes:
            time.sleep(0.9 * self.step_s)
        return future


def test_a_launch_that_takes_long_makes_no_step_longer() -> None:
    """A step is over when the device is done with it. Until the host is, others seem to take
    longer, and what a prompt costs is measured wrong. A busy machine may wake the device late."""
    assert any(long_steps() < 3 for _ in range(TRIES))


def long_steps() -> int:
    """How many steps of a row that decodes seem long, while three prompts come."""
    steps_s: list[float] = []
    loop, executor = running_loop(
        SlowLaunch(), on_step=lambda step_s, decoded: steps_s.append(step_s if decoded else 0.0)
    )
    submit(loop, 0, output=200)
    for number in (1, 2, 3):
        steps = len(executor.plans) + 4
        wait_until(lambda steps=steps: len(executor.plans) > steps)
        submit(loop, number, output=1, prompt=100)
    wait_until(lambda: len(executor.plans) > steps + 6)
    loop.stop()
    return sum(step_s > 1.5 * STEP_S for step_s in steps_s)


def test_a_launch_that_takes_long_is_no_reason_to_launch_early() -> None:
    """The device begins a step with a prompt while the host still launches it. A busy machine may
    be late at other launches, too."""
    assert any(lead_beside_prompts() < 0.3 * STEP_S for _ in range(TRIES))


def lead_beside_prompts() -> float:
    """The lead of a loop in whose steps twelve prompts came."""
    loop, executor = running_loop(SlowLaunch())
    submit(loop, 0, output=200)
    for number in range(1, 13):
        steps = len(executor.plans) + 3
        wait_until(lambda steps=steps: len(executor.plans) > steps)
        submit(loop, number, output=1, prompt=100)
    wait_until(lambda: len(executor.plans) > steps + 6)
    loop.stop()
    return loop._pacer.lead_s


def test_who_arrives_during_a_step_is_in_the_next_one() -> None:
    """Launched at once instead, the next step would leave without them, and most would say 1. So
    they do where the machine is late at every launch, which it is not every time."""
    for _ in range(TRIES):
        waited = steps_waited()
        if sorted(waited)[len(waited) // 2] == 0:
            break
    assert sorted(waited)[len(waited) // 2] == 0, waited


def steps_waited() -> list[int]:
    """Whole steps that each of some requests waited for, beside the one it arrived in."""
    loop, executor = running_loop()
    submit(loop, 0)
    time.sleep(6 * STEP_S)
    found = []
    for number in range(1, 12):
        arrived = time.monotonic()
        submit(loop, number)
        time.sleep(4.4 * STEP_S)
        while (joined := began_after(executor, arrived)) is None:
            time.sleep(STEP_S)
        running = sum(began <= arrived for began in executor.began)
        found.append(joined - running)
    loop.stop()
    return found


def test_pages_are_found_while_a_step_runs_not_when_the_next_is_due() -> None:
    loop, executor = running_loop()
    submit(loop, 0, output=200)
    wait_until(lambda: len(executor.plans) > 6)
    waits_s = []
    for number in range(1, 12):
        steps = len(executor.plans)
        wait_until(lambda steps=steps: len(executor.plans) > steps)
        time.sleep(max(0.0, executor.began[-1] - time.monotonic()) + 0.1 * STEP_S)
        reserved: queue.SimpleQueue[float] = queue.SimpleQueue()
        asked = time.monotonic()
        loop.submit(to_be_received(number), lambda _, to=reserved: to.put(time.monotonic()))
        waits_s.append(reserved.get(timeout=WAIT_S) - asked)
    loop.stop()
    assert sorted(waits_s)[len(waits_s) // 2] < 0.4 * STEP_S, waits_s


class Posting(TimedExecutor):
    """Some launches post a command, behind which the step before soon ends."""

    def __init__(self) -> None:
        super().__init__()
        self.command: Callable[[], None] | None = None

    def launch(self, step: StepPlan) -> Future[StepResult]:
        future = super().launch(step)
        if self.command is not None and len(self.plans) in (10, 20, 30):
            self.command()
        return future


def test_a_command_runs_behind_the_tokens_of_a_step_that_is_about_to_end() -> None:
    """Run when it comes, it might still run when the step ends, and all streams would wait."""
    assert any(steps_told_before_commands() == [9, 19, 29] for _ in range(TRIES))


def steps_told_before_commands() -> list[int]:
    """How many steps had been told of when each command ran."""
    told: list[float] = []
    found: list[int] = []
    executor = Posting()
    loop, _ = running_loop(executor, on_step=lambda step_s, _: told.append(step_s))
    executor.command = lambda: loop.post(lambda _: found.append(len(told)))
    submit(loop, 0, output=40)
    wait_until(lambda: len(found) == 3)
    loop.stop()
    return found


def to_be_received(number: int) -> Request:
    """Its KV would come from elsewhere."""
    ids = np.full(64, number, np.int32)
    greedy = SamplingParams(temperature=0.0)
    return Request(number.to_bytes(16, "big"), ids, greedy, StopRules(9), Mode.RECEIVE)


def test_a_prompt_that_comes_while_another_is_computed_begins_when_that_one_ends() -> None:
    """Planned once the one before it is settled, it would begin later than that; so it does where
    the machine was late to take it up, which it is not every time."""
    assert any(gap_s() < 1e-9 for _ in range(TRIES))


def gap_s() -> float:
    """Seconds that the device idles between two prompts; the second comes during the first."""
    loop, executor = running_loop()
    for number, later_s in enumerate((2 * STEP_S, STEP_S / 3, 0)):  # The first tells the rate.
        submit(loop, number, output=1, prompt=100)
        while len(executor.plans) == number:
            time.sleep(0.001)
        time.sleep(later_s)
    loop.stop()
    return executor.began[2] - executor.began[1] - STEP_S


def test_prompts_that_come_while_another_is_computed_share_the_step_behind_it() -> None:
    """Launched as soon as it has come, the first of them would have a step for itself."""
    assert any(together() for _ in range(TRIES))


def together() -> bool:
    loop, executor = running_loop()
    submit(loop, 0, output=1, prompt=100)  # It tells the rate.
    wait_until(lambda: loop.load.tokens_sampled == 1)
    submit(loop, 1, output=1, prompt=100)
    wait_until(lambda: len(executor.plans) == 2)
    for number in (2, 3):
        time.sleep(STEP_S / 6)
        submit(loop, number, output=1, prompt=16)
    wait_until(lambda: loop.load.tokens_sampled == 4)
    loop.stop()
    return [step.num_tokens for step in executor.plans] == [100, 100, 32]


class Hanging(TimedExecutor):
    """Its second step ends when the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def _work(self, step: StepPlan, future: Future[StepResult], end: float) -> None:
        if step is not self.plans[0]:
            self.goes_on.wait(2 * WAIT_S)
        super()._work(step, future, end)


def test_commands_in_the_middle_of_a_step_are_no_progress() -> None:
    """A device that hangs is found by a counter that stands still, whoever talks to the loop."""
    executor = Hanging()
    loop, _ = running_loop(executor)
    submit(loop, 0, output=1, prompt=100)  # It tells the rate.
    wait_until(lambda: loop.load.tokens_sampled == 1)
    submit(loop, 1, output=1, prompt=100)
    wait_until(lambda: len(executor.plans) == 2)
    launched = loop.load.progress
    taken: queue.SimpleQueue[int] = queue.SimpleQueue()
    for _ in range(30):
        loop.post(lambda scheduler: taken.put(scheduler.batch.next_step))
        taken.get(timeout=WAIT_S)
    moved = loop.load.progress - launched
    executor.goes_on.set()
    wait_until(lambda: loop.load.tokens_sampled == 2 and loop.load.progress > launched + moved)
    loop.stop()
    assert moved <= 1, "the end of the turn that launched it"
