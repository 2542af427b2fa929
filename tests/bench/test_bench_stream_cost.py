"""The costs of tokens and requests at a router are measured to the end."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "says"),
    [
        (("--crowd", "--door", "http", "--parts"), "us of CPU a token"),
        (("--requests", "--chat", "--prompt", "64"), "ms of CPU a request"),
        (("--requests", "--callbacks"), "longer than 0.5 ms"),
    ],
    ids=["crowd", "requests", "callbacks"],
)
def test_it_says_what_it_measured(what: tuple[str, ...], says: str) -> None:
    few = ("--streams", "4", "--seconds", "1", "--runs", "1", "--step-ms", "20")
    command = [sys.executable, "-m", "bench.stream_cost", *what, *few]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert says in told
