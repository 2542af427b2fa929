"""The wait for the slowest rank, summed between two times."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from engine.ranks import skew
from engine.ranks.skew import SkewHistory

rng = np.random.default_rng(3)


class Counting(np.ndarray):
    """Counts how many of its entries are read."""

    read = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        Counting.read += np.size(found)
        return found


@pytest.mark.parametrize("steps", [0, 1, 300, skew.STEPS + 3000])
def test_a_sum_is_that_of_the_steps_between(steps):
    ended_ns = np.cumsum(rng.integers(0, 3, steps)) + 1000  # Some end at the same time.
    skews_s = rng.integers(0, 100, steps) / 128  # Sums of these are exact.
    times = iter(ended_ns.tolist())
    history = SkewHistory(lambda: next(times))
    for each in skews_s.tolist():
        history.add(each)
    assert history.total_s == skews_s.sum()
    kept = min(steps, skew.STEPS - 512)
    since = ended_ns[-kept] if steps > kept else 0
    latest = int(ended_ns[-1]) if steps else 1000
    around = [0, 999, 1000, latest - 1, latest, latest + 1, 1 << 62]
    around += rng.integers(900, latest + 100, 40).tolist()
    for start, end in itertools.combinations(sorted(max(since, each) for each in around), 2):
        want = skews_s[(start < ended_ns) & (ended_ns <= end)].sum()
        assert history.between(int(start), int(end)) == want
    assert history.between(0, latest) <= skews_s.sum(), "what is forgotten is left out"


def test_a_clock_that_is_set_back_loses_what_was_before_and_nothing_after():
    times = iter([5_000, 5_010, 1_000, 1_010, 1_020, 5_005])
    history = SkewHistory(lambda: next(times))
    for _ in range(6):
        history.add(0.5)
    assert history.between(990, 1_015) == 1.0
    assert history.between(1_015, 6_000) == 1.0
    assert history.total_s == 3.0


def test_few_of_the_steps_are_looked_at():
    times = itertools.count(1000)
    history = SkewHistory(lambda: next(times))
    for _ in range(skew.STEPS):
        history.add(0.01)
    for name in ("_ended_ns", "_totals_s"):
        setattr(history, name, getattr(history, name).view(Counting))
    assert history.between(30_000, 40_000) == pytest.approx(100.0)
    assert Counting.read < 100
