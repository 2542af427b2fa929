"""A share of the tokens may come late, for urgent prompts, and no more."""

from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
import pytest
from test_planning import planned
from test_scheduler_property import Bench, prompt_of
from timed_device import VOCAB, TimedExecutor, running_loop
from waiting import wait_until

from engine.late_budget import SHORT_STEPS, WINDOW_TOKENS, LateBudget
from engine.load import begun_prefill_tokens
from engine.settling import settle_step
from engine.step import StepPlan, StepResult
from engine.types import Event, NewTokens, Request, SamplingParams, StopRules

SHARE = 30 / WINDOW_TOKENS
"""Ten late steps of three sequences."""
MIXED, STEP = 8, 64
GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("seed", range(5))
def test_among_any_tokens_no_more_than_the_share_come_late(seed: int) -> None:
    rng = np.random.default_rng(seed)
    budget = LateBudget(share := 0.005)
    tokens, late = [], []
    for _ in range(20_000):
        decodes = int(rng.integers(1, 60))
        is_long = budget.allows(decodes) and rng.random() < 0.2
        budget.planned(decodes, is_long=is_long)
        tokens.append(decodes)
        late.append(decodes * is_long)
    tokens_sum, late_sum = np.cumsum(tokens), np.cumsum(late)
    assert late_sum[-1] > 0.9 * share * tokens_sum[-1], "the share is of use"
    for begin in range(0, 20_000, 371):
        seen = tokens_sum[begin:] - tokens_sum[begin]
        came_late = late_sum[begin:] - late_sum[begin]
        assert (came_late <= share * (seen + WINDOW_TOKENS) + 60).all()


def test_without_a_share_none_do() -> None:
    budget = LateBudget(0.0)
    budget.planned(1, is_long=False)
    assert budget.steps(1) == 0
    assert not budget.allows(1)


def test_short_steps_come_between_two() -> None:
    budget = LateBudget(0.5)
    for _ in range(3):
        assert budget.allows(1)
        budget.planned(1, is_long=True)
        for _ in range(SHORT_STEPS):
            assert not budget.allows(1)
            assert budget.steps(1)
            budget.planned(1, is_long=False)


def pieces(bench: Bench) -> list[int]:
    """Prompt tokens beside decode rows, step by step, to the end."""
    found = []
    while (plan := planned(bench)) is not None:
        if plan.num_decodes and plan.num_tokens > plan.num_decodes:
            found.append(plan.num_tokens - plan.num_decodes)
        settle_step(bench.scheduler, plan, bench.device.launch(plan).result())
    return found


def decoding(**options) -> Bench:
    """Three sequences that decode, for 200 steps."""
    usual = {"num_pages": 400, "slots": 16, "step_tokens": STEP, "mixed": MIXED}
    bench = Bench(**{**usual, "prefix_cache": False, **options})
    for seed in range(3):
        bench.submit(prompt_of(random.Random(seed), 4), 200)
    for _ in range(4):
        bench.turn()
    return bench


def test_urgent_prompts_and_those_before_them_fill_steps() -> None:
    bench = decoding(late_share=SHARE, full=32)
    bench.submit(prompt_of(random.Random(7), 40), 1)
    bench.submit(prompt_of(random.Random(8), 60), 1, urgent=True)
    found = pieces(bench)
    # Whole pages of what three rows leave, and no prompt waits for a full step.
    assert found == [60, MIXED, MIXED, 24]


def test_where_nothing_decodes_steps_stay_short() -> None:
    """Who is delivered meanwhile waits for the end of one."""
    bench = Bench(num_pages=400, step_tokens=STEP, mixed=MIXED, alone=16, late_share=SHARE)
    bench.submit(prompt_of(random.Random(8), 60), 1, urgent=True)
    tokens = []
    while (plan := planned(bench)) is not None:
        tokens.append(plan.num_tokens)
        settle_step(bench.scheduler, plan, bench.device.launch(plan).result())
    assert tokens == [16, 16, 16, 12]


def test_the_others_are_computed_in_short_pieces() -> None:
    bench = decoding(late_share=SHARE)
    bench.submit(prompt_of(random.Random(8), 60), 1)
    assert max(pieces(bench)) == MIXED


def test_without_a_budget_nobody_hurries() -> None:
    bench = decoding()
    bench.submit(prompt_of(random.Random(8), 60), 1, urgent=True)
    assert max(pieces(bench)) == MIXED


def test_when_it_is_spent_they_go_on_in_short_pieces() -> None:
    bench = decoding(late_share=SHARE / 9)  # one long step of three sequences
    bench.submit(prompt_of(random.Random(8), 100), 1, urgent=True)
    assert pieces(bench)[:2] == [60, MIXED]


def crowded(**options) -> Bench:
    """As `decoding`, where the three break their pace by themselves."""
    bench = decoding(**options)
    bench.scheduler.mixed_has_room = False
    return bench


def test_where_no_piece_keeps_the_pace_long_steps_are_for_everybody() -> None:
    bench = crowded(late_share=SHARE)
    bench.submit(prompt_of(random.Random(7), 40), 1)
    bench.submit(prompt_of(random.Random(8), 60), 1)
    assert pieces(bench) == [60, 40]


def test_where_no_piece_keeps_the_pace_the_budget_is_waited_for() -> None:
    """In pieces the prompt would make many more tokens late than it saves them."""
    bench = crowded(late_share=0.05)
    spent = bench.scheduler.late.steps(1)
    bench.scheduler.late.planned(spent, is_long=True)
    bench.submit(prompt_of(random.Random(8), 60), 1)
    begun = 0
    while not bench.scheduler.late.steps(3):
        plan = planned(bench)
        assert plan.num_tokens == plan.num_decodes
        settle_step(bench.scheduler, plan, bench.device.launch(plan).result())
        begun += 1
    assert begun == pytest.approx(1 / 0.05, abs=1)
    assert pieces(bench) == [60]


def test_where_no_piece_keeps_the_pace_a_short_prompt_is_no_worse_than_a_long_step() -> None:
    bench = crowded(late_share=SHARE)
    bench.scheduler.late.planned(30, is_long=True)
    bench.submit(prompt_of(random.Random(8), MIXED), 1)
    bench.submit(prompt_of(random.Random(9), MIXED + 1), 1)
    assert pieces(bench) == [MIXED], "the other one, once nobody decodes"
    assert not bench.scheduler.jobs


@pytest.mark.parametrize("share", [0.0, 2 / WINDOW_TOKENS])
def test_a_budget_that_will_never_do_is_not_waited_for(share: float) -> None:
    bench = crowded(late_share=share)
    bench.submit(prompt_of(random.Random(8), 60), 1)
    assert max(pieces(bench)) == MIXED


def test_a_step_is_long_by_the_pace_of_the_moment() -> None:
    """Also where pieces may be as long as a step, as with workers of both roles."""
    bench = decoding(late_share=SHARE / 9, mixed=STEP)
    bench.scheduler.mixed_tokens = MIXED
    bench.submit(prompt_of(random.Random(8), 100), 1, urgent=True)
    assert pieces(bench)[:3] == [60, MIXED, MIXED]


def test_who_is_computed_again_does_not_hurry_and_is_not_of_those_queued() -> None:
    """Its first token has come, and the others' are not late for the rest."""
    bench = decoding(late_share=SHARE)
    request_id = bench.submit(prompt_of(random.Random(8), 60), 50, urgent=True)
    for _ in range(3):
        bench.turn()
    (sequence,) = bench.scheduler.jobs[request_id].sequences
    assert sequence.job.joined
    bench.scheduler.preempt(sequence)
    for _ in range(3):
        bench.turn()
    (task,) = bench.scheduler.prefills
    assert task.leader is sequence
    assert task.cursor > 0
    assert begun_prefill_tokens(bench.scheduler) == 0
    assert max(pieces(bench)) == MIXED


def test_what_is_begun_is_what_is_launched_of_new_prompts() -> None:
    bench = decoding()
    bench.submit(prompt_of(random.Random(8), 60), 1)
    bench.turn()
    bench.turn()
    assert begun_prefill_tokens(bench.scheduler) == 2 * MIXED


def test_nobody_hurries_for_who_left() -> None:
    bench = decoding(late_share=SHARE)
    gone = bench.submit(prompt_of(random.Random(8), 60), 1, urgent=True)
    bench.scheduler.cancel(gone)
    bench.submit(prompt_of(random.Random(9), 60), 1)
    assert max(pieces(bench)) == MIXED


class Watched(TimedExecutor):
    """At each launch, whether it is of a long step, and how many tokens were told before it."""

    def __init__(self) -> None:
        super().__init__()
        self.told = 0
        self.launches: list[tuple[bool, int]] = []

    def launch(self, step: StepPlan) -> Future[StepResult]:
        self.launches.append((step.is_long, self.told))
        return super().launch(step)

    def hear(self, events: list[Event]) -> None:
        self.told += sum(isinstance(event, NewTokens) for event in events)


def test_tokens_do_not_wait_for_the_launch_of_a_long_step() -> None:
    """It is launched kernel by kernel, which takes the host longer than a step."""
    executor = Watched()
    loop, _ = running_loop(executor, mixed_late_share=SHARE, mixed_prefill_tokens=16)
    streamed = Request(bytes(16), np.arange(5, dtype=np.int32), GREEDY, StopRules(40))
    loop.post(lambda scheduler: scheduler.submit(streamed, executor.hear))
    wait_until(lambda: executor.told > 3)
    ids = (np.arange(100, dtype=np.int32) + 7) % VOCAB
    urgent = Request(bytes([1] * 16), ids, GREEDY, StopRules(1), urgent=True)
    loop.post(lambda scheduler: scheduler.submit(urgent, lambda _: None))
    wait_until(lambda: executor.told >= 20)
    loop.stop()
    # The first step computes the stream's prompt, and every step gives it one token.
    behind = [step - told for step, (_, told) in enumerate(executor.launches)]
    by_length = {is_long: set() for is_long in (False, True)}
    for late, (is_long, _) in zip(behind[2:20], executor.launches[2:20], strict=True):
        by_length[is_long].add(late)
    assert by_length == {False: {1}, True: {0}}
