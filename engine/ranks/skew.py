"""The wait for the slowest rank of the last steps, by the time at which each ended.

One thread adds, others read. A step that is added meanwhile may be missed; it ended just now.

Invariant: the times of the entries that are read are in order. When the clock was set back, what
ended before is forgotten.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from typing import Final

import numpy as np

STEPS: Final = 1 << 16
"""Steps that are remembered: eleven minutes of 10 ms."""
_UNREAD: Final = 256
"""The oldest entries, which may be written again while somebody reads."""


class SkewHistory:
    """The time for which the fastest rank of a step waited for the slowest.

    Args:
        clock: Unix nanoseconds.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self.total_s = 0.0
        """Sum over all steps."""
        self._clock = clock
        self._ended_ns = np.zeros(STEPS, np.int64)
        self._totals_s = np.zeros(STEPS)
        """The sum over all steps up to each."""
        self._first = 0
        """Number of the first entry that is remembered. It stands for all that is forgotten."""
        self._end = 1
        """Number of the next entry. Entry i is at i % STEPS."""

    def add(self, skew_s: float) -> None:
        """A step has ended now."""
        now_ns = self._clock()
        if now_ns < self._ended_ns[(self._end - 1) % STEPS]:
            self._put(0)
            self._first = self._end - 1
        self.total_s += skew_s
        self._put(now_ns)

    def between(self, start_ns: int, end_ns: int) -> float:
        """The sum over the remembered steps that ended between two times, Unix nanoseconds."""
        end = self._end
        first = max(self._first, end - STEPS + _UNREAD)
        return self._up_to(end_ns, first, end) - self._up_to(start_ns, first, end)

    def _put(self, ended_ns: int) -> None:
        at = self._end % STEPS
        self._ended_ns[at], self._totals_s[at] = ended_ns, self.total_s
        self._end += 1  # Nobody reads the entry before.

    def _up_to(self, time_ns: int, first: int, end: int) -> float:
        """The sum over all steps that ended by then, by the entries from `first` on."""
        entries = range(first, end)
        found = bisect_right(entries, time_ns, key=lambda entry: self._ended_ns[entry % STEPS])
        return float(self._totals_s[entries[max(0, found - 1)] % STEPS])
