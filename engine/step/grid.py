"""A worker's ranks as a grid: stages, one behind the other, of ranks beside each other.

A stage has some layers. Its ranks divide the weights of these among themselves. Rank 0 is of the
last stage: it draws the tokens, so scheduler and sampler are in one process whatever the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

STAGE_CHUNKS: Final = 3
"""Chunks of a prompt for each stage: with two stages, the first and the last one wait for 1/7 of
the time. Not tuned."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The shape of a worker's ranks. With S stages of N ranks, rank r is the rank r % N of the
    stage r // N, counted from the last one."""

    stages: int = 1
    tp: int = 1
    """Ranks of each stage."""

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.stages * self.tp

    def stage_of(self, rank: int) -> int:
        """The stage of a rank; 0 has the first layers."""
        return self.stages - 1 - rank // self.tp

    def within(self, rank: int) -> int:
        """The place of a rank in its stage."""
        return rank % self.tp
