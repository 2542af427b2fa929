"""Pieces of prompts are as long as the pace of those who decode allows."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from timed_device import TimedExecutor, plan, running_loop, submit
from waiting import wait_until

from engine.late_budget import SHORT_STEPS
from engine.mixed_pace import FORGET_STEPS, GRAIN_TOKENS, LEAST_TOKENS, MixedPace
from engine.step import StepPlan, StepResult

ALONE_S = 6e-3


class Gpu:
    """Decode steps, with pieces of one prompt: what a token costs grows with those before it."""

    def __init__(self, token_s: float = 12e-6, behind_s: float = 1e-9) -> None:
        self._token_s = token_s
        self._behind_s = behind_s
        self.behind = 0

    def step_s(self, piece: int) -> float:
        took_s = ALONE_S + piece * (self._token_s + self._behind_s * self.behind)
        self.behind += piece
        return took_s


def steps_s(pace: MixedPace, gpu: Gpu, count: int) -> list[float]:
    pace.settled(plan(4, 4), ALONE_S)
    found = []
    for _ in range(count):
        piece = pace.tokens
        found.append(gpu.step_s(piece))
        pace.settled(plan(4 + piece, 4), found[-1])
    return found


def test_pieces_get_shorter_until_they_fit_and_stay_so_as_the_prompt_goes_on() -> None:
    pace, gpu = MixedPace(192, 7.5e-3), Gpu()
    found = steps_s(pace, gpu, 30)
    assert found[0] > 8e-3, "the first is as long as it may be"
    assert max(found[2:]) < 7.5e-3 * 1.02
    assert LEAST_TOKENS < pace.tokens < 192, "no shorter than need be"
    assert pace.tokens % GRAIN_TOKENS == 0
    assert gpu.step_s(pace.tokens + 2 * GRAIN_TOKENS) > 7.5e-3


def test_they_get_longer_again_by_one_size_a_step() -> None:
    pace = MixedPace(192, 7.5e-3)
    steps_s(pace, Gpu(token_s=40e-6), 10)
    assert pace.tokens == LEAST_TOKENS
    sizes = []
    for _ in range(8):
        steps_s(pace, Gpu(token_s=5e-6, behind_s=0), 1)
        sizes.append(pace.tokens)
    assert sizes[-1] == 192
    assert all(0 <= step <= GRAIN_TOKENS for step in np.diff(sizes))


@pytest.mark.parametrize(("step_s", "tokens"), [(0.0, 192), (1.0, 192), (1e-3, LEAST_TOKENS)])
def test_bounds(step_s: float, tokens: int) -> None:
    pace = MixedPace(192, step_s)
    steps_s(pace, Gpu(), 20)
    assert pace.tokens == tokens


def test_a_piece_is_never_shorter_than_a_page() -> None:
    pace = MixedPace(256, 1e-3, page_size=128)
    steps_s(pace, Gpu(), 20)
    assert pace.tokens == 128


@pytest.mark.parametrize("piece", [40, 60])
def test_they_get_longer_again_where_none_fills_the_least(piece: int) -> None:
    """Of pages of 40 tokens, or of prompts that are short."""
    pace = MixedPace(192, 7.5e-3)
    steps_s(pace, Gpu(token_s=40e-6), 10)
    assert pace.tokens == LEAST_TOKENS
    for _ in range(6):
        pace.settled(plan(4 + piece, 4), ALONE_S + LEAST_TOKENS * 5e-6)
    assert pace.tokens > LEAST_TOKENS


def test_the_pace_is_kept_where_no_step_decodes_alone() -> None:
    pace, gpu = MixedPace(192, 7.5e-3), Gpu(behind_s=0)
    for _ in range(30):
        piece = pace.tokens
        pace.settled(plan(4 + piece, 4), took_s := gpu.step_s(piece))
    assert took_s < 7.5e-3
    assert piece > LEAST_TOKENS
    steps_s(pace, gpu, 10)
    assert pace.tokens >= piece, "once one has, it is known what a token costs"


def test_nothing_is_learnt_from_prompts_alone_or_from_their_short_ends() -> None:
    pace = MixedPace(192, 7.5e-3)
    pace.settled(plan(4, 4), ALONE_S)
    pace.settled(plan(2048, 0), 50e-3)
    pace.settled(plan(4 + 16, 4), 50e-3)
    assert pace.tokens == 192


def test_what_a_prompt_would_take_is_learnt_from_whole_ones() -> None:
    """Not from the last steps, which take longest: a prompt is sent where it is sooner done."""
    pace, gpu = MixedPace(192, 8.5e-3), Gpu(behind_s=2e-9)
    for _ in range(4):
        gpu.behind, took_s = 0, 0.0
        pace.settled(plan(4, 4), ALONE_S)
        while gpu.behind < 8000:
            took_s += steps_s(pace, gpu, 1)[0]
    whole = gpu.behind / took_s
    last = pace.tokens / gpu.step_s(pace.tokens)
    assert last < 0.75 * whole
    assert pace.tokens_per_s == pytest.approx(whole, rel=0.15)


def test_a_batch_that_grew_meanwhile_is_not_charged_to_the_prompt() -> None:
    def alone_s(decodes: int) -> float:
        return 5e-3 + 0.25e-3 * decodes

    pace = MixedPace(192, 8.5e-3)
    assert pace.tokens_per_s == 0
    for decodes in (2, 3, 4, 3, 2):
        pace.settled(plan(decodes, decodes), alone_s(decodes))
    for decodes in [2] * 100 + [3, 4, 5, 6, 7, 8]:
        piece = pace.tokens
        pace.settled(plan(decodes + piece, decodes), alone_s(decodes) + piece * 10e-6)
    assert pace.tokens == 128, "what fits into the room that 8 sequences leave"
    assert pace.tokens_per_s == pytest.approx(128 / (alone_s(8) + 128 * 10e-6), rel=0.03)
    for decodes, tokens_per_s in ((2, 192 / (alone_s(2) + 192 * 10e-6)), (13, 25 / 8.5e-3)):
        pace.settled(plan(decodes, decodes), alone_s(decodes))
        assert pace.tokens_per_s == pytest.approx(tokens_per_s, rel=0.06), "as the pace allows"
    pace.settled(plan(20, 20), alone_s(20))
    assert pace.tokens_per_s == 1, "which is none"


def test_an_estimate_that_keeps_prompts_away_is_forgotten_and_the_next_one_counts_at_once() -> None:
    pace, slow = MixedPace(192, 7.5e-3), Gpu(token_s=80e-6, behind_s=0)
    steps_s(pace, slow, 10)
    assert pace.tokens_per_s < 64 / ALONE_S
    for _ in range(4 * FORGET_STEPS):
        pace.settled(plan(4, 4), ALONE_S)
    assert pace.tokens_per_s == 0, "nobody knows"
    assert pace.tokens == 192
    found = 0
    while not pace.tokens_per_s:
        found += 1
        steps_s(pace, slow, 1)
    assert 2 <= found <= 512 // 64, "not by a single step"
    steps_s(pace, slow, 8)
    assert pace.tokens_per_s < 64 / ALONE_S, "no prompt more than one is lost to hope"


def test_where_decoding_alone_takes_too_long_pieces_are_the_shortest_whatever_a_token_costs() -> (
    None
):
    pace = MixedPace(192, 7.5e-3)
    pace.settled(plan(4, 4), 8e-3)
    assert pace.tokens == LEAST_TOKENS, "nobody knows what a token costs"
    pace.settled(plan(4 + 64, 4), 8e-3)
    assert pace.tokens == LEAST_TOKENS, "nothing, it seems"


@pytest.mark.parametrize("held_up", [0, 128])
def test_a_step_that_was_held_up_says_little(held_up: int) -> None:
    """By a process that was stopped, or a garbage collection."""
    pace, gpu = MixedPace(192, 7.5e-3), Gpu(behind_s=0)

    def go_on() -> None:
        for _ in range(20):
            steps_s(pace, gpu, 1)
            for _ in range(9):
                pace.settled(plan(4, 4), ALONE_S)

    for _ in range(10):
        go_on()
    tokens_per_s = pace.tokens_per_s
    pace.settled(plan(4 + held_up, 4), 5.0)
    go_on()
    assert pace.tokens >= 96
    assert pace.tokens_per_s == pytest.approx(tokens_per_s, rel=0.3)


@pytest.mark.parametrize("slope_s", [-1e-3, 1e-3])
def test_a_step_of_few_is_never_taken_to_last_less_than_none_nor_longer_than_one_of_many(
    slope_s: float,
) -> None:
    """By what steps of 60 sequences vary."""
    pace = MixedPace(192, 7.5e-3)
    for decodes in (60, 61, 62) * 20:
        pace.settled(plan(decodes, decodes), 6e-3 + slope_s * (decodes - 61))
    for _ in range(4):  # until it is known what a token costs
        pace.settled(plan(60 + 128, 60), 6.5e-3)
    for decodes in (60, 30, 5, 1):
        pace.settled(plan(decodes + 128, decodes), 6.5e-3)
        assert pace.tokens_per_s >= 128 / 6.5e-3
        assert 0 < pace._alone_s <= 6.01e-3


def test_steps_of_urgent_prompts_tell_of_themselves_alone() -> None:
    pace, gpu = MixedPace(192, 7.5e-3), Gpu(behind_s=0)
    steps_s(pace, gpu, 12)
    before = pace.tokens, pace.tokens_per_s
    assert pace.long_tokens_per_s(2000) == 0, "nobody knows"
    for _ in range(6):
        pace.settled(plan(4 + 2000, 4), ALONE_S + 2000 * 24e-6)
    assert (pace.tokens, pace.tokens_per_s) == before
    usual = SHORT_STEPS * pace.tokens  # of the steps between them, 12 us a token
    between_s = SHORT_STEPS * ALONE_S + usual * 12e-6
    for tokens in (1000, 2000):
        rate = (tokens + usual) / (ALONE_S + tokens * 24e-6 + between_s)
        assert pace.long_tokens_per_s(tokens) == pytest.approx(rate, rel=0.02)
    pace.settled(plan(4 + 2000, 4), 5.0)
    assert pace.long_tokens_per_s(2000) > 2000 / 0.12, "one that was held up says little"


def test_what_long_steps_took_is_forgotten_too() -> None:
    """The first may have been held up, and who is told so sends no other."""
    pace = MixedPace(192, 0)
    pace.settled(plan(4 + 2000, 4), 5.0)
    for _ in range(FORGET_STEPS - 1):
        pace.settled(plan(4, 4), ALONE_S)
    assert 0 < pace.long_tokens_per_s(2000) < 500
    pace.settled(plan(4, 4), ALONE_S)
    assert pace.long_tokens_per_s(2000) == 0, "nobody knows"


class PiecesTakeTime(TimedExecutor):
    """Every token of a piece makes a step longer by 0.5 ms."""

    def launch(self, step: StepPlan) -> Future[StepResult]:
        self.step_s = 0.02 + 5e-4 * (step.num_tokens - step.num_decodes)
        return super().launch(step)


def test_the_step_loop_keeps_the_pace() -> None:
    loop, executor = running_loop(PiecesTakeTime(), mixed_step_s=0.06)
    submit(loop, 0, output=200)
    wait_until(lambda: len(executor.plans) > 8)
    submit(loop, 1, output=1, prompt=1600)
    wait_until(lambda: loop.load.tokens_sampled > 30)
    loop.stop()
    assert loop.load.mixed_prefill_tokens < 128, "routers know"
    assert 0 < loop.load.mixed_prefill_tokens_per_s < 64 / 0.02
    pieces = [step.num_tokens - step.num_decodes for step in executor.plans if step.num_decodes]
    found = [piece for piece in pieces if piece]
    assert found[0] == 128
    assert sorted(found[4:-1])[len(found) // 2] == LEAST_TOKENS, found


@pytest.mark.parametrize(("step_s", "has_room"), [(0.06, True), (0.01, False)])
def test_the_step_loop_tells_the_scheduler_whether_there_is_room(
    step_s: float, has_room: bool
) -> None:
    """Where there is none a prompt is computed in a long step, urgent or not."""
    loop, executor = running_loop(PiecesTakeTime(), mixed_step_s=step_s, mixed_late_share=0.01)
    submit(loop, 0, output=200)
    wait_until(lambda: len(executor.plans) > 8)
    submit(loop, 1, prompt=180)
    wait_until(lambda: sum(plan.num_tokens - plan.num_decodes for plan in executor.plans) >= 185)
    assert any(plan.is_long for plan in executor.plans) is not has_room
    loop.stop()
