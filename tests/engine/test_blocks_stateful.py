"""The block manager against a naive model, under any order of operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.pages.blocks import BlockManager, OutOfPagesError
from engine.pages.eviction import EVICTION_POLICIES
from engine.pages.lending import Loan
from engine.pages.watch import CacheEvent, CacheEventKind, CacheEvents
from prefixes.keys import page_keys


class Blocks(RuleBasedStateMachine):
    """Holders are lists of pages; the model counts them. Steps settle in order."""

    @initialize(num_pages=st.integers(2, 24), policy=st.sampled_from(sorted(EVICTION_POLICIES)))
    def start(self, num_pages, policy):
        self.blocks = BlockManager(num_pages, EVICTION_POLICIES[policy]())
        self.holders: list[list[int]] = []
        self.step = 0
        self.settled = -1
        self.writer: dict[int, int] = {}
        self.cached: dict[bytes, int] = {}
        self.events: list[CacheEvent] = []
        self.loans: list[list[Loan]] = []
        """Copies under way."""
        self.void: set[Loan] = set()
        """Loans whose page lost its key."""
        self.below: set[bytes] = set()
        """Keys in the lower tier."""
        self.blocks.start_lending(self.below)
        self.blocks.subscribe(self.hear_all)

    def hear_all(self, events: CacheEvents) -> None:
        for event in events.each():
            self.hear(event)

    def hear(self, event: CacheEvent) -> None:
        self.events.append(event)
        if event.kind is CacheEventKind.STORED:
            self.cached[event.key] = event.page
        elif event.kind is CacheEventKind.EVICTED:
            assert self.cached.pop(event.key) == event.page
            loans = (loan for copy in self.loans for loan in copy)
            self.void.update(loan for loan in loans if loan.page == event.page)

    def held(self) -> set[int]:
        return {page for holder in self.holders for page in holder}

    def busy(self) -> set[int]:
        """Pages that a launched step may still write."""
        return {page for page, step in self.writer.items() if step > self.settled}

    @rule(count=st.integers(0, 8), apart=st.booleans())
    def allocate(self, count, apart):
        allocate = self.blocks.allocate_apart if apart else self.blocks.allocate
        available = self.blocks.available
        if count > available:
            with pytest.raises(OutOfPagesError):
                allocate(count)
            assert self.blocks.available == available
            return
        pages = allocate(count).tolist()
        assert self.blocks.available == available - count
        assert len(set(pages)) == count
        assert 0 not in pages, "the scratch page was given out"
        assert not set(pages) & self.held(), "a held page was given out"
        assert not set(pages) & self.busy(), "a page that a step may write was given out"
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        holder = data.draw(st.sampled_from(self.holders))
        self.blocks.share(np.array(holder, np.int32))
        self.holders.append(list(holder))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.blocks.release(np.array(holder, np.int32))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def launch(self, data):
        """A step writes pages that are held and have no key."""
        keyed = set(self.cached.values())
        pages = sorted(set(data.draw(st.sampled_from(self.holders))) - keyed)
        self.blocks.mark_written(np.array(pages, np.int32), self.step)
        self.writer.update(dict.fromkeys(pages, self.step))
        self.step += 1

    @precondition(lambda self: self.settled < self.step - 1)
    @rule()
    def settle(self):
        self.settled += 1
        self.blocks.settle(self.settled)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), text=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def publish(self, data, text):
        holder = data.draw(st.sampled_from(self.holders))
        pages = [page for page in holder if page not in self.busy()][: len(text)]
        keys = page_keys(np.array(text, np.int32), 1)[: len(pages)]
        self.blocks.publish(np.array(pages, np.int32), keys)

    @rule(text=st.lists(st.integers(0, 2), max_size=6))
    def acquire(self, text):
        keys = page_keys(np.array(text, np.int32), 1)
        count = self.blocks.count_cached(keys)
        want = [self.cached[key] for key in keys[:count]]
        assert count == len(keys) or keys[count] not in self.cached
        pages = self.blocks.acquire(keys).tolist()
        assert pages == want
        self.holders.append(pages)

    @rule(count=st.integers(0, 4))
    def lend(self, count):
        """Pages that only the cache holds and no tier has, a page once at a time."""
        loans = self.blocks.lend(count)
        pages = [loan.page for loan in loans]
        assert len(set(pages)) == len(pages) <= count
        for loan in loans:
            assert self.cached[loan.key] == loan.page
            assert loan.key not in self.below
        assert not set(pages) & self.held()
        self.loans.append(loans)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def lend_held(self, data):
        """As for a preempted sequence: its pages are held until the copy ends."""
        holder = np.array(data.draw(st.sampled_from(self.holders)), np.int32)
        loans = self.blocks.lend_held(holder)
        assert all(loan.key not in self.below for loan in loans)
        pages = [loan.page for loan in loans]
        self.blocks.share(np.array(pages, np.int32))
        self.holders.append(pages)
        self.loans.append(loans)

    @precondition(lambda self: self.loans)
    @rule(data=st.data(), saved=st.booleans())
    def take_back(self, data, saved):
        loans = self.loans.pop(data.draw(st.integers(0, len(self.loans) - 1)))
        kept = self.blocks.take_back(loans, saved=saved)
        assert kept == [loan for loan in loans if loan not in self.void]
        if saved:
            self.below.update(loan.key for loan in kept)

    @precondition(lambda self: self.below)
    @rule(data=st.data())
    def lose_below(self, data):
        key = data.draw(st.sampled_from(sorted(self.below)))
        self.below.remove(key)
        self.blocks.lost_below(key)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data):
        self.blocks.forget(np.array(data.draw(st.sampled_from(self.holders)), np.int32))

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def pin(self, data):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.cached.values())), unique=True))
        self.blocks.pin(np.array(pages, np.int32))
        self.holders.append(pages)

    @invariant()
    def what_is_ready_is_free_or_has_a_copy_below(self):
        if hasattr(self, "blocks"):
            held = self.held()
            saved = [key for key, page in self.cached.items() if page not in held]
            in_both = sum(key in self.below for key in saved)
            assert self.blocks.ready == self.blocks.free + in_both

    @invariant()
    def books_agree(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check_invariants()
        counts = np.zeros(self.blocks.num_pages, np.int32)
        for holder in self.holders:
            np.add.at(counts, holder, 1)
        self.blocks.check_holders(counts)
        accounted = self.blocks.free + self.blocks.evictable + self.blocks.settling
        assert accounted + len(self.held()) == self.blocks.total
        assert [event.sequence for event in self.events] == list(range(1, len(self.events) + 1))


def test_a_page_is_free_behind_its_last_writer_and_not_before() -> None:
    """Released before the step that writes it is done, and while an earlier one is settled."""
    blocks = BlockManager(4, EVICTION_POLICIES["lru"]())
    pages = blocks.allocate(2)
    blocks.mark_written(pages[:1], 0)
    blocks.mark_written(pages[1:], 1)
    blocks.release(pages)
    assert (blocks.free, blocks.settling) == (1, 2)
    blocks.settle(0)
    assert (blocks.free, blocks.settling) == (2, 1)
    blocks.settle(1)
    assert (blocks.free, blocks.settling) == (3, 0)


def test_a_key_keeps_its_first_page() -> None:
    blocks = BlockManager(4, EVICTION_POLICIES["lru"]())
    first, second = blocks.allocate(1), blocks.allocate(1)
    keys = page_keys(np.array([1], np.int32), 1)
    blocks.settle(0)
    blocks.publish(first, keys)
    blocks.publish(second, keys)
    blocks.check_invariants()
    assert blocks.acquire(keys).tolist() == first.tolist()


def test_growth_evicts_as_many_as_it_lacks() -> None:
    blocks = BlockManager(4, EVICTION_POLICIES["lru"]())
    pages = blocks.allocate(2)
    blocks.settle(0)
    blocks.publish(pages, page_keys(np.array([1, 2], np.int32), 1))
    blocks.release(pages)
    assert sorted(blocks.allocate_apart(3).tolist()) == [1, 2, 3]


def cached_pages(count: int) -> tuple[BlockManager, list[bytes]]:
    """As many cached pages, the coldest first, and no other."""
    blocks = BlockManager(count + 1)
    blocks.start_lending()
    keys = page_keys(np.arange(count, dtype=np.int32), 1)
    pages = blocks.allocate(count)
    blocks.publish(pages, keys)
    for page in pages.tolist():
        blocks.release(np.array([page], np.int32))
    return blocks, keys


def test_saved_pages_go_first_among_the_coldest_eighth_and_no_others():
    blocks, keys = cached_pages(40)
    loans = blocks.lend(4)
    assert [loan.key for loan in loans] == keys[:4]
    blocks.take_back(loans[2:], saved=True)
    assert blocks.ready == 2
    assert blocks.allocate_apart(2).tolist() == [loans[2].page, loans[3].page]
    # Those on loan go last: two others are taken, although they are warmer.
    assert blocks.allocate_apart(2).size == 2
    assert blocks.take_back(loans[:2], saved=True) == loans[:2]
    assert blocks.ready == 2


def test_a_loan_leaves_the_recency_as_it_was():
    blocks, keys = cached_pages(16)
    blocks.take_back(blocks.lend(2), saved=False)
    blocks.allocate_apart(2)
    assert blocks.count_cached(keys) == 0
    assert [blocks.page_of(key) for key in keys[:3]] == [None, None, 3]


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(stateful_step_count=50)


def test_keys_depend_on_everything_before_and_on_the_tenant():
    tokens = np.arange(64, dtype=np.int32)
    keys = page_keys(tokens, 16)
    assert len(set(keys)) == 4
    assert page_keys(tokens[:40], 16) == keys[:2]
    assert page_keys(tokens, 16, known=keys[:2]) == keys
    changed = tokens.copy()
    changed[0] += 1
    assert not set(page_keys(changed, 16)) & set(keys)
    assert not set(page_keys(tokens, 16, b"tenant")) & set(keys)


FREED = np.array([2, 4, 6, 7, 9, 10, 11, 12, 13], np.int32)


@pytest.mark.parametrize(
    ("count", "found"),
    [
        (0, []),
        (1, [2]),
        (2, [6, 7]),
        (3, [9, 10, 11]),
        (7, [6, 7, 9, 10, 11, 12, 13]),
        (8, [2, 6, 7, 9, 10, 11, 12, 13]),
    ],
)
def test_the_shortest_run_that_holds_them_or_as_few_runs_as_there_are(count, found):
    blocks = BlockManager(20)
    blocks.allocate(19)
    blocks.release(FREED)
    assert blocks.allocate(count).tolist() == found


def test_pages_that_may_lie_anywhere_fill_the_gaps():
    blocks = BlockManager(20)
    blocks.allocate(19)
    blocks.release(FREED)
    assert blocks.allocate_apart(3).tolist() == [2, 4, 6]
    assert blocks.allocate_apart(3).tolist() == [7, 9, 10]


def test_a_cached_prefix_loses_its_end_first():
    blocks = BlockManager(9)
    tokens = np.arange(64, dtype=np.int32)
    keys = page_keys(tokens, 16)
    pages = blocks.allocate(4)
    blocks.publish(pages, keys)
    blocks.release(pages)
    blocks.allocate(6)
    assert blocks.count_cached(keys) == 2
