"""Which cached page goes first, by each policy."""

from __future__ import annotations

import numpy as np
import pytest

from engine.pages.blocks import BlockManager
from engine.pages.eviction import EVICTION_POLICIES, LfuEviction
from prefixes.keys import page_keys

PAGE = 16
Keys = list[bytes]


class Cache:
    """A block manager whose sequences are named by the first token of their prompt."""

    def __init__(self, policy: str, num_pages: int) -> None:
        self.blocks = BlockManager(num_pages + 1, EVICTION_POLICIES[policy]())

    def run(self, keys: Keys) -> int:
        """A sequence comes and goes. Returns how many of its pages were cached."""
        found = self.blocks.acquire(keys)
        fresh = self.blocks.allocate_apart(len(keys) - len(found))
        pages = np.concatenate([found, fresh])
        self.blocks.publish(fresh, keys[len(found) :])
        self.blocks.release(pages)
        self.blocks.check_invariants()
        return len(found)

    def need(self, count: int) -> None:
        """Somebody else needs so many pages for a moment: what is evicted is gone."""
        self.blocks.release(self.blocks.allocate_apart(count))

    def cached(self, keys: Keys) -> int:
        """Leading pages in the cache."""
        return self.blocks.count_cached(keys)


def sequence(name: int, num_pages: int, shared: Keys | None = None) -> Keys:
    """Keys of a sequence, behind those that it shares."""
    tokens = np.full(num_pages * PAGE, name, np.int32)
    own = page_keys(tokens, PAGE, shared[-1] if shared else b"")
    return [*(shared or []), *own]


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_a_prefix_loses_its_end_before_its_beginning(policy: str) -> None:
    """A page is found by way of all before it: without them it would only be in the way."""
    cache, keys = Cache(policy, 100), sequence(1, 100)
    cache.run(keys)
    for kept in (99, 60, 10):
        cache.need(100 - kept)
        assert cache.cached(keys) == kept


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_what_is_shared_outlives_what_hangs_on_it(policy: str) -> None:
    shared = sequence(1, 20)
    one, other = sequence(2, 20, shared), sequence(3, 40, shared)
    cache = Cache(policy, 80)
    for keys in (one, other, one):
        cache.run(keys)
    cache.need(60)
    assert cache.cached(shared) == 20


def test_lru_lets_go_of_what_was_not_used_for_longest() -> None:
    cache = Cache("lru", 12)
    a, b, c = (sequence(name, 4) for name in (1, 2, 3))
    for keys in (a, a, a, b, c, b):
        cache.run(keys)
    cache.need(4)
    assert [cache.cached(keys) for keys in (a, b, c)] == [0, 4, 4]
    cache.need(8)
    assert [cache.cached(keys) for keys in (a, b, c)] == [0, 4, 0]


def test_what_is_used_often_outlives_what_was_used_last() -> None:
    cache = Cache("lfu", 12)
    often, twice, once = (sequence(name, 4) for name in (1, 2, 3))
    for keys in (often, often, often, twice, twice, once):
        cache.run(keys)
    cache.need(4)
    assert [cache.cached(keys) for keys in (often, twice, once)] == [4, 4, 0]
    cache.need(8)
    assert [cache.cached(keys) for keys in (often, twice, once)] == [4, 0, 0]


def test_uses_count_while_others_hold_the_page_too() -> None:
    cache = Cache("lfu", 12)
    held, older = sequence(1, 4), sequence(2, 4)
    cache.run(older)
    cache.run(older)
    cache.run(held)
    holder = cache.blocks.acquire(held)
    for _ in range(3):
        cache.run(held)
    cache.blocks.release(holder)
    cache.need(8)
    assert [cache.cached(keys) for keys in (held, older)] == [4, 0]


def test_hits_without_an_eviction_take_no_memory() -> None:
    """A hot prefix is queued anew at each use; what was queued before must not pile up."""
    eviction = LfuEviction()
    for page in range(8):
        eviction.add(page)
    for _ in range(10_000):
        eviction.remove(3)
        eviction.add(3)
    assert len(eviction) == 8
    assert len(eviction._heap) < 200
    assert sorted(eviction.pop() for _ in range(8)) == list(range(8))
    with pytest.raises(KeyError):
        eviction.pop()
