"""What one worker tells costs the router's event loop no more where there are many workers."""

from __future__ import annotations

import time
from collections.abc import Callable

from prefixes.index import POOL, PrefixIndex

MANY = 256
MOST_TIMES = 10
"""By so much may the time of one differ on a busy machine. With a look at every holder for every
key it was 60 times."""


def an_index(holders: int) -> PrefixIndex:
    index = PrefixIndex(400_000)
    for number in range(holders):
        index.join(str(number))
    return index


def apply(index: PrefixIndex, keys: list[int]) -> None:
    index.apply("0", keys, bytes((POOL,)) * len(keys))


def replaced_s(holders: int) -> float:
    """CPU time in which a part of a snapshot replaces what was known."""
    index = an_index(holders)
    apply(index, [(number << 10) | number % 61 for number in range(2048)])
    began_s = time.thread_time()
    index.clear("0", 0, 61)
    took_s = time.thread_time() - began_s
    assert index.counts("0") == (0, 0)
    return took_s


def overflowing_s(holders: int) -> float:
    """CPU time of events for a shard that is full."""
    index = an_index(holders)
    apply(index, [number << 10 for number in range(400)])
    more = [number << 10 for number in range(1000, 1500)]
    began_s = time.thread_time()
    apply(index, more)
    took_s = time.thread_time() - began_s
    assert index.dropped
    assert index.counts("0") == (len(index), 0)
    return took_s


def test_to_forget_keys_costs_no_look_at_every_worker() -> None:
    for measure in (replaced_s, overflowing_s):
        assert least(measure, MANY) < MOST_TIMES * least(measure, 1), measure.__name__


def least(measure: Callable[[int], float], holders: int) -> float:
    return min(measure(holders) for _ in range(3))
