"""Pieces of prompts are as long as the pace of those who decode allows."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from timed_device import TimedExecutor, plan, running_loop, submit
from waiting import wait_until

from engine.mixed_pace import GRAIN_TOKENS, LEAST_TOKENS, MixedPace
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
    pieces = [step.num_tokens - step.num_decodes for step in executor.plans if step.num_decodes]
    found = [piece for piece in pieces if piece]
    assert found[0] == 128
    assert sorted(found[4:-1])[len(found) // 2] == LEAST_TOKENS, found
