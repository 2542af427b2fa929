"""A rank reads its part of a 70B checkpoint, and needs little memory of its host."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import sparse_checkpoint
from bench.ranks import SHAPES, read_rank

MOST_HOST_GIB = 2.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_of_eight_reads_a_70b_checkpoint_in_little_memory(tmp_path: Path) -> None:
    size = sparse_checkpoint.write(SHAPES / "llama-70b", tmp_path)
    assert size > 141e9
    figures = read_rank(tmp_path, 7, 8)
    print(figures)
    assert 0 < figures["host_gib"] <= MOST_HOST_GIB
