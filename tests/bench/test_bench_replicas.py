"""Workers that do both, in virtual time: what a draw's figures follow from."""

from __future__ import annotations

import time
from argparse import Namespace

from bench.replicas import Run
from engine.loop import rates, step_loop

LENGTHS = [(1024, 24)]


def figures(*launch_ms: float, chunk: int = 0, rate: float = 24.0) -> list[float]:
    options = Namespace(slow=1.0, chunk=chunk, launch_ms=launch_ms, requests=24)
    return Run(LENGTHS, rate, 0, options).figures()


def test_a_launch_longer_than_its_step_delays_first_tokens_and_the_rows_beside() -> None:
    first, _, gap, gaps, *_ = figures(5.0, 5.0)
    later, _, same, longest, *_ = figures(60.0, 60.0)
    assert first + 5 < later
    assert gaps < 35 < 55 < longest, "a step of 30 ms, one of 60"
    assert abs(gap - same) < 1, "the steps of rows alone are as they were"
    assert vars(step_loop)["time"] is vars(rates)["time"] is time, "its clock is its own"


def test_a_prompt_beside_rows_is_whole_or_in_chunks() -> None:
    *_, steps, several = figures(5.0, 5.0)
    assert steps * (1 + several) >= 24 >= steps, "one step a prompt, or one of several"
    *_, longest, _, steps, _ = figures(5.0, 5.0, chunk=192)
    assert steps > 4 * 24
    assert longest < 15, "such a step has a graph, and reads the weights once"


def test_one_worker_computes_all_where_it_is_alone() -> None:
    assert figures(5.0, rate=1.0)[0] < 26, "21 ms of a prompt, 2 of messages"
