"""Deadlines near the time that a request takes, on a virtual clock (`bench.overload`)."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from scripted_worker import job

from bench.overload import CHAT, Worker, run
from router.dispatch.job_run import JobRun

ONE_PACE, SHARED = 0.0, 0.8
"""Parts of a token's time that are due to others: an answer takes 1.5 s, or 0.4 to 1.5 s."""


@pytest.mark.parametrize(
    ("shared", "noise", "deadline_s", "factor", "late", "refused"),
    [
        (ONE_PACE, 0, 1.6, 2, 0.05, 1),
        (SHARED, 0, 1.2, 2, 0.05, 1),
        (SHARED, 0, 1.4, 3, 0.05, 1),
        (SHARED, 0.15, 1.6, 2, 0.05, 1),
        (SHARED, 0.3, 2.0, 3, 0.05, 1),
        (ONE_PACE, 0, 1.6, 0.3, 0, 0),
        (SHARED, 0, 1.2, 0.3, 0, 0),
        (ONE_PACE, 0.1, 1.6, 0.3, 0.3, 0),
    ],
)
def test_what_is_taken_is_in_time(
    monkeypatch: pytest.MonkeyPatch,
    shared: float,
    noise: float,
    deadline_s: float,
    factor: float,
    late: float,
    refused: float,
) -> None:
    """Under overload. Without it nobody is refused."""
    monkeypatch.setattr(Worker, "shared", shared)
    monkeypatch.setattr(Worker, "noise", noise)
    found = run(CHAT, factor, 15, deadline_s, 0, False)
    assert found["late_of_taken"] <= late
    assert found["refused"] <= refused
    assert found["good"] > 0.8 * min(1, factor) * (1 - late)


def test_the_time_before_the_queue_counts() -> None:
    """A prompt that was tokenized for 50 of its 60 s has 10 s left."""
    late = replace(job(deadline_s=60), began_s=time.monotonic() - 50)
    assert JobRun(late, lambda event: None).left_s <= 10
