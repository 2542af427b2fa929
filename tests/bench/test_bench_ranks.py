"""What the script for several ranks measures: a rank's reading of 70B, and steps."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bench import sparse_checkpoint
from bench.ranks import CONTEXT, ROWS, SHAPES, read_rank, steps

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
    model = {"model": SHAPES / "tiny", "device": "cpu", "rows": ROWS, "context": CONTEXT}
    steps(Namespace(ranks=[1, 2], **model), lines.append)
    assert [(line["ranks"], line["rows"]) for line in lines] == [
        (ranks, rows) for ranks in (1, 2) for rows in ROWS
    ]
    for line in lines:
        assert line["step_ms"] > 0
        assert ("skew_ms" in line) == (line["ranks"] == 2)
