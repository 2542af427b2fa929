"""The autoscaler of `bench.scaling` keeps Kubernetes' rules, and its cluster loses no request."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest

from bench.balance import Request
from bench.scaling import DOWN_S, SYNC_S, WINDOW_S, Pool, Scaled, Trigger

EACH, WHOLE = {"figure": Trigger(0.5, each=True)}, {"figure": Trigger(2.0, each=False)}


def pool(now: int, least: int = 1, most: int = 20) -> Pool:
    return Pool(least, most, now, deque([(0.0, now)]), [(-3600.0, now)])


@pytest.mark.parametrize(
    ("now", "ready", "figure", "of", "wanted"),
    [
        (4, 4, 2.19, EACH, 4),  # within a tenth of the target
        (4, 4, 2.3, EACH, 5),
        (4, 2, 2.3, EACH, 5),  # pods' figures know nothing of pods that start
        (2, 2, 40.0, EACH, 4),  # twice as many in 30 s
        (4, 4, 3.0, WHOLE, 6),
        (6, 4, 3.0, WHOLE, 6),  # a pool's figure is one of those that are ready
        (4, 4, 40.0, {**EACH, **WHOLE}, 8),
        (16, 16, 40.0, EACH, 20),
    ],
)
def test_a_pool_grows(
    now: int, ready: int, figure: float, of: dict[str, Trigger], wanted: int
) -> None:
    grown = pool(now)
    grown.look(SYNC_S, ready, dict.fromkeys(of, figure), of)
    assert grown.now == wanted


def test_a_pool_shrinks_by_one_in_its_time_and_to_its_least() -> None:
    shrunk, now_s = pool(5, least=2), 0.0
    while now_s < WINDOW_S + 6 * DOWN_S:
        now_s += SYNC_S
        shrunk.look(now_s, shrunk.now, {"figure": 0.1}, EACH)
    times = [at_s for at_s, _ in shrunk.changes[1:]]
    assert [size for _, size in shrunk.changes[1:]] == [4, 3, 2]
    assert times[0] > WINDOW_S
    assert all(b - a >= DOWN_S for a, b in pairwise(times))
    assert shrunk.turns() == 0
    shrunk.look(now_s + SYNC_S, 2, {"figure": 2.0}, EACH)
    assert (shrunk.now, shrunk.turns()) == (4, 1)


def test_a_cluster_grows_and_shrinks_and_serves_everybody() -> None:
    """A minute of 30 a second, which is far more than two workers can do, and an hour of few."""
    busy = [Request(number / 30, 2_000, 500) for number in range(1_800)]
    calm = [Request(60 + 10.0 * number, 1_000, 60) for number in range(360)]
    cluster = Scaled((1, 1), 1, 8, start_s=60.0)
    cluster.run([*busy, *calm])
    assert all(one.ended_s > one.at_s for one in busy + calm)
    assert all(one.kept for one in calm[100:])
    for grown in cluster.pools.values():
        assert max(size for _, size in grown.changes) > 1
        assert grown.now == 1
        assert grown.turns() == 1
