"""What the script for several ranks measures: a rank's reading of 70B, steps, and hand-offs."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench import sparse_checkpoint
from bench.rank_workers import hand_off
from bench.ranks import ROWS, SHAPES, _child, _first_of, read_rank, steps

MOST_HOST_GIB = 2.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_of_eight_reads_a_70b_checkpoint_in_little_memory(tmp_path: Path) -> None:
    size = sparse_checkpoint.write(SHAPES / "llama-70b", tmp_path)
    assert size > 141e9
    figures = read_rank(tmp_path, 7, 8)
    print(figures)
    assert 0 < figures["host_gib"] <= MOST_HOST_GIB


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_steps_are_measured_to_their_end() -> None:
    lines: list[dict[str, Any]] = []
    model = {"model": SHAPES / "tiny", "device": "cpu", "rows": ROWS, "context": None}
    options = Namespace(ranks=[1, 2], quantization="", **model)
    steps(options, lines.append)
    measured = [line for line in lines if "step_ms" in line]
    starts = [line for line in lines if "ready_s" in line]
    assert len(measured) == len(lines) - len(starts)
    for start in starts:
        assert 0 < start["first_weights_s"] <= start["weights_s"] < start["ready_s"]
    assert [line["ranks"] for line in starts] == [1, 2]
    assert [(line["ranks"], line["rows"]) for line in measured] == [
        (ranks, int(rows)) for ranks in (1, 2) for rows in ROWS.split(",")
    ]
    for line in measured:
        assert line["step_ms"] > 0
        assert ("skew_ms" in line) == (line["ranks"] == 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hand_offs_of_long_prompts_tell_their_exposed_time() -> None:
    lines: list[dict[str, Any]] = []
    model = {"model": SHAPES / "tiny", "device": "cpu", "context": 3000}
    hand_off(Namespace(ranks=[1, 2], **model), lines.append)
    assert [(line["prefill_ranks"], line["decode_ranks"]) for line in lines] == [
        (prefill, decode) for prefill in (1, 2) for decode in (1, 2)
    ]
    for line in lines:
        assert line["prompt_tokens"] == 3000
        assert line["exposed_ms"] > 0
        assert line["gb_per_s"] > 0


@pytest.mark.timeout(60)
def test_a_rank_that_ends_ends_the_others(tmp_path: Path) -> None:
    """Rank 0 would wait for it for an hour."""
    waits = _child("collective", tmp_path / "store", 0, 2)
    ends = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], text=True)
    with pytest.raises(SystemExit, match="rank 1 ended with code 3"):
        _first_of([waits, ends])
    assert waits.returncode is not None
