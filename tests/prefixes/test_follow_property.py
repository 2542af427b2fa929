"""The router's index is what the workers hold, after any loss, disorder, damage and restart."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefixes.codec import MOST_BYTES, Events, ShardSnapshot, Wanted
from prefixes.follower import Follower
from prefixes.index import BOTH, GONE, GROUP, HOST, POOL, SHARDS, Held, PrefixIndex
from prefixes.keys import short_key, short_keys
from prefixes.log import PageLog
from prefixes.reporter import PageReporter

KEYS = [hashlib.sha256(bytes((number,))).digest() for number in range(30)]
NAMES = ("a", "b")
keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)
names = st.sampled_from(NAMES)
changed_kinds = (POOL, HOST, POOL | GONE, HOST | GONE)
kinds = st.sampled_from(changed_kinds)
group_kinds = st.sampled_from(
    [kind + GROUP * group for kind in changed_kinds for group in range(3)]
)
faults = st.sampled_from([None, "lose", "repeat", "turn", "cut", "swell", "garble"])


def turns_of(kinds: st.SearchStrategy[int]) -> st.SearchStrategy:
    changes = st.lists(st.tuples(kinds, keys), max_size=3)
    return st.lists(
        st.tuples(names, changes, faults, st.integers(0, 3), st.integers(0, 6)),
        min_size=1,
        max_size=5,
    )


class Worker:
    """A worker, and the two ways of its stream to the router."""

    def __init__(self) -> None:
        self.log = PageLog(size=8, most_events=3, most_in_part=3)
        self.truth: dict[int, int] = {}
        """Tiers of group 0 by key."""
        self.others: dict[tuple[int, int], int] = {}
        """Tiers by group and key, of other groups."""
        self.connect()

    def connect(self) -> None:
        self.reporter: PageReporter | None = None
        self.told: deque[Events | ShardSnapshot] = deque()
        self.asked: deque[Wanted] = deque()

    def change(self, kind: int, changed: list[bytes]) -> None:
        self.log.write(changed, bytes((kind,)) * len(changed))
        group, kind = divmod(kind, GROUP)
        for key in map(short_key, changed):
            truth, name = (self.others, (group, key)) if group else (self.truth, key)
            old = truth.get(name, 0)
            now = old & ~kind if kind & GONE else old | kind
            truth[name] = now
            if not now:
                del truth[name]

    def turn(self) -> None:
        if self.asked:
            self.reporter = PageReporter(self.log, self.asked.pop(), most_at_once=2)
            self.asked.clear()
        if self.reporter is not None:
            self.told += self.reporter.turn()


class Following(RuleBasedStateMachine):
    """Two workers with a tiny ring, one router."""

    needed: tuple[int, ...] = ()
    """Pages before a place where a prompt goes on, of groups 1, 2, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.workers = {name: Worker() for name in NAMES}
        self.start_router()

    def start_router(self) -> None:
        self.index = PrefixIndex(resume_pages=self.needed)
        self.dropped, self.asked = Counter[str](), Counter[str]()
        self.followers: dict[str, Follower] = {}
        for name in NAMES:
            self.connect(name)

    def connect(self, name: str) -> None:
        """A new stream: all that the old one carried is lost."""
        worker = self.workers[name]
        worker.connect()
        if name in self.followers:
            self.followers[name].end()
        ask = worker.asked.append
        follower = Follower(self.index, name, ask, self.dropped, self.asked)
        self.followers[name] = follower
        follower.start(self.now_s)

    @rule(name=names, what=st.sampled_from(["router", "worker", "stream", "question"]))
    def break_down(self, name: str, what: str) -> None:
        if what == "question":
            self.workers[name].asked.clear()
        elif what == "router":
            self.start_router()
        else:
            if what == "worker":
                self.workers[name] = Worker()
            self.connect(name)

    @rule(turns=turns_of(kinds))
    def live(self, turns) -> None:
        for turn in turns:
            self.take_turn(*turn)

    def take_turn(self, name: str, changes, fault: str | None, place: int, heard: int) -> None:
        """Pages change, the worker tells of some, the stream is disturbed, the router hears."""
        worker = self.workers[name]
        for kind, changed in changes:
            worker.change(kind, changed)
        self.now_s += 0.05
        worker.turn()
        if fault and worker.told:
            self.disturb(worker.told, fault, place % len(worker.told))
        for _ in range(min(heard, len(worker.told))):
            self.hear(name, worker.told.popleft())

    def hear(self, name: str, message: Events | ShardSnapshot) -> None:
        follower = self.followers[name]
        take = follower.events if isinstance(message, Events) else follower.part
        take(message, self.now_s)

    @rule(name=names)
    def report(self, name: str) -> None:
        self.followers[name].announced(self.workers[name].log.end - 1, self.now_s)

    def disturb(self, told: deque[Events | ShardSnapshot], fault: str, place: int) -> None:
        message = told[place]
        if fault == "lose":
            del told[place]
        elif fault == "repeat":
            told.append(message)
        elif fault == "turn":
            told.rotate(place + 1)
        elif fault == "cut":
            told[place] = message._replace(keys=message.keys + b"1234")
        elif fault == "swell":
            told[place] = message._replace(keys=bytes(MOST_BYTES))
        else:
            wrong = {"kinds": b"\7"} if isinstance(message, Events) else {"tiers": b"\0"}
            told[place] = message._replace(keys=bytes(8), **wrong)

    @invariant()
    def counts_are_right(self) -> None:
        for name in NAMES:
            pool, host = self.index.counts(name)
            tiers_of = [self.index.tiers(name, short_key(key)) for key in KEYS]
            assert pool == sum(tiers & POOL for tiers in tiers_of)
            assert host == sum((tiers & HOST) // HOST for tiers in tiers_of)

    def teardown(self) -> None:
        """The faults are over: soon the router knows everything, and only that."""
        for _ in range(200):
            for name, worker in self.workers.items():
                worker.turn()
                while worker.told:
                    self.hear(name, worker.told.popleft())
                self.report(name)
            self.now_s += 0.5
            if all(self.is_reported(name) for name in NAMES):
                break
        while self.index.sweep():
            pass
        truths = [{*one.truth, *(key for _, key in one.others)} for one in self.workers.values()]
        for name, worker in self.workers.items():
            known = {short_key(key): self.index.tiers(name, short_key(key)) for key in KEYS}
            assert {key: tiers for key, tiers in known.items() if tiers} == worker.truth
            assert worker.truth == worker.log.tiers()
            for group in range(1, 1 + len(self.needed)):
                own = {key: tiers for (of, key), tiers in worker.others.items() if of == group}
                assert worker.log.tiers(group) == own
            assert self.followers[name].behind == 0
        assert len(self.index) == len(set().union(*truths))
        prompt = short_keys(KEYS)
        assert self.index.held(prompt) == self.really_held(prompt.tolist())

    def is_reported(self, name: str) -> bool:
        worker = self.workers[name]
        told = worker.reporter is not None and worker.reporter.is_done and not worker.asked
        return told and self.followers[name].is_in_step

    def really_held(self, prompt: list[int]) -> dict[str, Held]:
        found = {}
        for name, worker in self.workers.items():
            pool, host = (
                next((i for i, key in enumerate(prompt) if not worker.truth.get(key, 0) & t), 30)
                for t in (POOL, BOTH)
            )
            if host:
                usable = (
                    usable_of(worker.others, prompt, most, tiers, self.needed)
                    for most, tiers in ((pool, POOL), (host, BOTH))
                )
                found[name] = Held(pool, host, *usable)
        return found


def usable_of(
    others: dict[tuple[int, int], int],
    prompt: list[int],
    most: int,
    tiers: int,
    needed: tuple[int, ...],
) -> int:
    """The deepest place up to `most` before which each group has what it needs, by looking."""
    return next(
        end
        for end in range(most, -1, -1)
        if all(
            others.get((group, key), 0) & tiers
            for group, pages in enumerate(needed, 1)
            for key in prompt[max(0, end - pages) : end]
        )
    )


class FollowingGroups(Following):
    """A model with three groups."""

    needed = (1, 3)

    @rule(turns=turns_of(group_kinds))
    def live(self, turns) -> None:
        for turn in turns:
            self.take_turn(*turn)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_usable_ends_where_all_groups_have_what_they_need(seed: int) -> None:
    rng = random.Random(seed)
    needed = rng.choice([(1,), (4,), (2, 7), (0, 3), (40,)])
    index, prompt = PrefixIndex(resume_pages=needed), list(range(1, 41))
    others: dict[str, dict[tuple[int, int], int]] = {}
    for holder in ("a", "b", "c"):
        index.join(holder)
        index.apply(holder, prompt, bytes((POOL,)) * 40)
        others[holder] = {}
        for group in range(1, 1 + len(needed)):
            for key in prompt:
                if rng.random() < 0.8:
                    tier = rng.choice([POOL, POOL, HOST])
                    others[holder][group, key] = tier
                    index.apply(holder, [key], bytes((tier + GROUP * group,)))
    held = index.held(np.array(prompt, np.uint64))
    for holder, own in others.items():
        pool, host = (usable_of(own, prompt, 40, tiers, needed) for tiers in (POOL, BOTH))
        assert held[holder] == Held(40, 40, pool, host)


TestFollowing = Following.TestCase
TestFollowingGroups = FollowingGroups.TestCase
TestFollowing.settings = TestFollowingGroups.settings = settings(stateful_step_count=20)


def test_a_full_shard_drops_what_came_first_and_counts_it() -> None:
    index = PrefixIndex(most_keys=16 * SHARDS)
    index.join("a")
    index.join("b")
    same_shard = [number * SHARDS + 5 for number in range(40)]
    index.apply("a", same_shard, bytes((POOL,)) * 40)
    index.apply("b", same_shard[-3:], bytes((HOST,)) * 3)
    assert len(index) <= 16
    assert index.dropped == 40 - len(index)
    assert index.tiers("a", same_shard[0]) == 0
    assert index.tiers("a", same_shard[-1]) == POOL
    assert index.counts("a") == (len(index), 0)
    assert index.counts("b") == (0, 3)
    index.leave("a")
    while index.sweep():
        pass
    assert len(index) == 3
    assert index.held(np.array(same_shard[-3:], np.uint64)) == {"b": Held.all(0, 3)}


def test_a_place_is_given_away_only_when_nothing_of_it_is_left() -> None:
    index = PrefixIndex()
    index.join("old")
    index.apply("old", range(5000), bytes((POOL,)) * 5000)
    index.leave("old")
    index.sweep()
    index.join("new")
    assert index.held(np.arange(5000, dtype=np.uint64)) == {}
    while index.sweep():
        pass
    index.join("newest")
    assert index.counts("newest") == (0, 0)
    assert len(index) == 0
    assert index.held(np.arange(5000, dtype=np.uint64)) == {}
