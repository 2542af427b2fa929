"""The wait for the slowest rank of the last steps, by the time at which each ended.

One thread adds, others read. A step that is added meanwhile may be missed; it ended just now.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

STEPS: Final = 1 << 16
"""Steps that are remembered: eleven minutes of 10 ms."""


class SkewHistory:
    """The time for which the fastest rank of a step waited for the slowest."""

    def __init__(self) -> None:
        self.total_s = 0.0
        """Sum over all steps."""
        self._ended_ns = np.zeros(STEPS, np.int64)
        self._skews_s = np.zeros(STEPS)
        self._next = 0

    def add(self, skew_s: float) -> None:
        """A step has ended now."""
        self.total_s += skew_s
        self._ended_ns[self._next] = 0  # Nobody reads the entry while it is written.
        self._skews_s[self._next] = skew_s
        self._ended_ns[self._next] = time.time_ns()
        self._next = (self._next + 1) % STEPS

    def between(self, start_ns: int, end_ns: int) -> float:
        """The sum over the remembered steps that ended between two times, Unix nanoseconds."""
        ended_ns = self._ended_ns
        return float(self._skews_s[(start_ns < ended_ns) & (ended_ns <= end_ns)].sum())
