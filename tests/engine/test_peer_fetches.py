"""Fetches between two schedulers; the test plays workers, router and transport between them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
from scheduler_bench import Bench, prompt_of

from engine.pages.prefix import prompt_keys
from engine.schedule.sequences import RequestState
from engine.tiers.peers import FetchWanted
from engine.types import Mode, PeerFetch

WINDOWS = ((5, 61), (17, 81))
"""Tokens and pages of each."""
SLOW = pytest.mark.slow


class HeldBack(list):
    """Copies that do not end before the test says so."""

    go = False

    def __bool__(self) -> bool:
        return self.go and len(self) > 0


class Between:
    """The transport: moves pages when the test says so, and what is late lands late."""

    def __init__(self, fetcher: Bench, holder: Bench) -> None:
        self.fetcher, self.holder = fetcher, holder
        self.wanted: list[FetchWanted] = []
        fetcher.scheduler.fetches.fetch_by(self.wanted.append)

    def move(self, wanted: FetchWanted, most: int = 1000) -> tuple[int, bool]:
        """The holder's pages land. Returns how many of group 0, and whether all of the others."""
        sources = held_by(self.holder, wanted.id, [part.keys for part in wanted.parts])
        self.holder.scheduler.check_invariants()
        pools = zip(self.pools(self.fetcher), self.pools(self.holder), strict=True)
        whole = most >= len(wanted.parts[0].keys) and any(map(len, sources))
        for (own, other), came, part in zip(pools, sources, wanted.parts, strict=True):
            landed = came[: most if own is self.fetcher.device.kv else len(came) * whole]
            for source, target in zip(landed, part.pages, strict=False):
                own[target] = other[source]
        self.holder.scheduler.fetches.let_go(wanted.id)
        return len(sources[0][:most]), whole

    def end(self, wanted: FetchWanted, landed: int, others: bool = True) -> None:
        self.fetcher.scheduler.fetches.fetched(wanted.id, landed, others=others)
        self.fetcher.scheduler.fetches.freed(wanted.id)

    def land_late(self, wanted: FetchWanted, first: int, others: bool = False) -> None:
        """A late write: whoever had the pages by now would speak nonsense."""
        for group, (own, part) in enumerate(
            zip(self.pools(self.fetcher), wanted.parts, strict=True)
        ):
            own[part.pages[first if not group else len(part.pages) * others :]] = -7
        self.fetcher.scheduler.fetches.freed(wanted.id)

    @staticmethod
    def pools(bench: Bench) -> list[np.ndarray]:
        return [bench.device.kv, *bench.device.others]


def held(holder: Bench, prompt: list[int]) -> None:
    holder.submit(prompt, 1)
    holder.run()


def held_by(holder: Bench, hold_id: bytes, keys: list[list[bytes]]) -> list[np.ndarray]:
    """The pages that the holder keeps for a peer, by group, once they are in its pool."""
    told: list[tuple[list[np.ndarray], int]] = []
    rooms = holder.scheduler.admission.rooms_for_peers(len(keys[0]))
    holder.scheduler.fetches.hold(hold_id, keys, rooms, lambda *one: told.append(one))
    for _ in range(100):
        if told:
            return told[0][0]
        holder.turn()
    raise AssertionError("nothing is told")


def ask(fetcher: Bench, prompt: list[int], pages: int = 100, **options) -> bytes:
    return fetcher.submit(prompt, options.pop("tokens", 4), fetch=PeerFetch("d", pages), **options)


@pytest.fixture
def between() -> Between:
    return Between(Bench(num_pages=81), Bench(num_pages=81))


def test_a_request_waits_for_its_pages_and_computes_the_rest(between: Between) -> None:
    fetcher = between.fetcher
    prompt = prompt_of(random.Random(1), 34)
    held(between.holder, prompt)
    request_id = ask(fetcher, prompt)
    fetcher.turn()
    assert fetcher.scheduler.requests.by_id[request_id].state is RequestState.LOADING
    (wanted,) = between.wanted
    assert len(wanted.parts[0].keys) == 8
    assert fetcher.scheduler.fetches.coming_pages == 8
    between.end(wanted, *between.move(wanted))
    fetcher.run()
    fetcher.check_output(request_id)
    assert fetcher.scheduler.admission.cached_tokens == 32
    fetcher.check_baseline()
    between.holder.check_baseline()


def test_pages_come_from_host_slots_too() -> None:
    """The holder has evicted a part of them to its host tier."""
    between = Between(Bench(num_pages=200), Bench(num_pages=65, host_slots=200))
    rng = random.Random(3)
    prompts = [prompt_of(rng, 21) for _ in range(30)]
    for prompt in prompts:
        held(between.holder, prompt)
    for prompt in prompts[:3]:
        request_id = ask(between.fetcher, prompt)
        between.fetcher.turn()
        wanted = between.wanted[-1]
        assert not between.holder.blocks.count_cached(wanted.parts[0].keys)
        assert between.move(wanted) == (5, True)
        assert between.holder.blocks.count_cached(wanted.parts[0].keys) == 5
        between.end(wanted, 5)
        between.fetcher.run()
        between.fetcher.check_output(request_id)
    assert between.fetcher.scheduler.admission.cached_tokens == 3 * 20
    between.holder.check_baseline()


def in_slots(bench: Bench, count: int) -> list[bytes]:
    """Keys of pages that are in host slots alone."""
    keys = [number.to_bytes(32, "big") for number in range(count)]
    slots = bench.host.allocate(count)
    bench.host.adopt(slots.tolist(), keys)
    bench.host.release(slots)
    return keys


def test_a_hold_waits_for_the_copy_into_the_pool_and_nobody_waits_for_it() -> None:
    """Between GPUs host memory is slow, so no page leaves it for a peer."""
    bench = Bench(num_pages=200, host_slots=100)
    bench.lanes.loads.queued = held_back = HeldBack()
    keys = in_slots(bench, 6)
    told: list[tuple[list[np.ndarray], int]] = []
    fetches = bench.scheduler.fetches
    rooms = bench.scheduler.admission.rooms_for_peers(6)
    fetches.hold(b"hold", [keys], rooms, lambda *one: told.append(one))
    request_id = bench.submit(prompt_of(random.Random(1), 20), 4)
    bench.run()
    bench.check_output(request_id)
    assert not told
    held_back.go = True
    bench.turn()
    ((sources, loaded),) = told
    assert loaded == 6
    assert sources[0].tolist() == [bench.blocks.page_of(key) for key in keys]
    fetches.let_go(b"hold")
    bench.check_baseline()


@pytest.mark.parametrize(("room", "late", "given"), [(100, 0, 8), (2, 0, 2), (100, 1, 5)])
def test_a_hold_gives_what_there_is_room_for(room: int, late: int, given: int) -> None:
    """Five pages are in the pool and three in host memory, whose loads may be late."""
    bench = Bench(num_pages=200, host_slots=100)
    prompt = prompt_of(random.Random(1), 21)
    held(bench, prompt)
    keys = prompt_keys(bench.scheduler.config, bench.requests[bytes(16)], np.array(prompt))
    bench.lanes.loads.late = late
    told: list[tuple[list[np.ndarray], int]] = []
    wanted = [*keys, *in_slots(bench, 3)]
    bench.scheduler.fetches.hold(b"hold", [wanted], [room], lambda *one: told.append(one))
    bench.turn()
    assert len(told[0][0][0]) == given
    bench.scheduler.fetches.let_go(b"hold")
    bench.check_baseline()


def test_no_stream_loses_its_pages_to_a_peer() -> None:
    """What a peer gets cannot be evicted meanwhile. Streams grow into the pages that can be."""
    bench = Bench(num_pages=81, slots=2)
    prompt = prompt_of(random.Random(1), 37)
    held(bench, prompt)
    keys = prompt_keys(bench.scheduler.config, bench.requests[bytes(16)], np.array(prompt))
    streams = [bench.submit(prompt_of(random.Random(n), 139), 30) for n in (2, 3)]
    while bench.scheduler.batch.slots.running().size < 2:
        bench.turn()
    assert bench.blocks.available <= 10
    rooms = bench.scheduler.admission.rooms_for_peers(len(keys))
    bench.scheduler.fetches.hold(b"hold", [keys], rooms, lambda *_: None)
    for _ in range(4):
        bench.turn()
    assert bench.scheduler.requests.preemptions == 0
    bench.scheduler.fetches.let_go(b"hold")
    bench.run()
    for stream in streams:
        bench.check_output(stream)
    bench.check_baseline()


def test_a_preempted_request_has_the_room_before_a_peer() -> None:
    bench = Bench(num_pages=17, slots=4, host_slots=100)
    for _ in range(3):
        bench.submit(prompt_of(random.Random(1), 16), 40)
    while not bench.scheduler.requests.preempted:
        bench.turn()
    assert bench.scheduler.admission.rooms_for_peers(1) == [0]


def test_to_bring_pages_into_the_pool_takes_no_streams_time() -> None:
    """The step loop's work for a page is a few look-ups in dicts: 5 us, ten times those of a page
    that is in the pool. More than an eighth of the pool is never brought."""
    bench = Bench(num_pages=8001, host_slots=2001)
    keys = in_slots(bench, 1000)
    began_s = time.thread_time()
    assert len(held_by(bench, b"look", [keys])[0]) == 1000
    brought_s = time.thread_time() - began_s
    bench.scheduler.fetches.let_go(b"look")
    began_s = time.thread_time()
    held_by(bench, b"again", [keys])
    from_pool_s = time.thread_time() - began_s
    assert brought_s < 40 * from_pool_s


def test_what_is_here_is_not_fetched_and_stays(between: Between) -> None:
    """Pages that the request will find are held, while others fill the pool."""
    fetcher = between.fetcher
    rng = random.Random(1)
    prompt = prompt_of(rng, 34)
    held(between.holder, prompt)
    held(fetcher, prompt[:18])
    request_id = ask(fetcher, prompt)
    fetcher.turn()
    (wanted,) = between.wanted
    assert len(wanted.parts[0].keys) == 4
    for _ in range(20):
        fetcher.submit(prompt_of(rng, 30), 2)
    for _ in range(300):
        fetcher.turn()
    before = fetcher.scheduler.admission.cached_tokens
    between.end(wanted, *between.move(wanted))
    fetcher.run()
    fetcher.check_output(request_id)
    assert fetcher.scheduler.admission.cached_tokens - before == 32


def test_what_is_on_its_way_is_not_fetched_again(between: Between) -> None:
    """The first of two fetches has brought nothing, the second is still under way."""
    fetcher, holder = between.fetcher, between.holder
    prompt = prompt_of(random.Random(1), 45)
    held(holder, prompt)
    asked = [ask(fetcher, prompt[:18]), ask(fetcher, prompt[:34])]
    fetcher.turn()
    first, second = between.wanted
    assert (len(first.parts[0].keys), len(second.parts[0].keys)) == (4, 4)
    fetcher.scheduler.requests.cancel(asked.pop(0))
    fetcher.scheduler.fetches.fetched(first.id, 0)
    fetcher.scheduler.fetches.freed(first.id)
    asked.append(ask(fetcher, prompt))
    fetcher.turn()
    third = between.wanted[2]
    assert third.parts[0].keys[:4] == first.parts[0].keys
    assert len(third.parts[0].keys) == 6
    for wanted in (second, third):
        between.end(wanted, *between.move(wanted))
    fetcher.run()
    for request_id in asked:
        fetcher.check_output(request_id)
    fetcher.check_baseline()


def test_what_a_fetch_may_not_bring_stays_in_the_queue() -> None:
    """A fetch has an eighth of the pool, here 5 of 8 pages. The rest is not on its way."""
    between = Between(Bench(num_pages=41), Bench(num_pages=81))
    request_id = ask(between.fetcher, prompt_of(random.Random(1), 34))
    between.fetcher.turn()
    assert len(between.wanted[0].parts[0].keys) == 5
    assert between.fetcher.scheduler.requests.by_id[request_id].cached_tokens == 20
    between.end(between.wanted[0], 0)
    between.fetcher.run()
    between.fetcher.check_output(request_id)


def test_what_did_not_come_is_queued_again(between: Between) -> None:
    """The load report must not call a prompt cached whose fetch has failed, while it waits for
    its turn behind others."""
    fetcher = between.fetcher
    rng = random.Random(1)
    prompt = prompt_of(rng, 34)
    request_id = ask(fetcher, prompt)
    fetcher.turn()
    active = fetcher.scheduler.requests.by_id[request_id]
    assert active.cached_tokens == 32
    fetcher.submit(prompt_of(rng, 100), 2)
    fetcher.turn()
    (wanted,) = between.wanted
    between.end(wanted, 0)
    fetcher.turn()
    assert active.state is RequestState.WAITING
    assert active.cached_tokens == 0
    fetcher.run()
    fetcher.check_output(request_id)


def test_a_hand_off_that_is_received_fetches_nothing(between: Between) -> None:
    request_id = ask(between.fetcher, prompt_of(random.Random(1), 20), mode=Mode.RECEIVE)
    between.fetcher.turn()
    assert request_id in between.fetcher.reserved
    assert not between.wanted


@pytest.mark.parametrize("windows", [(), WINDOWS])
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=SLOW) for n in range(6, 50))])
def test_whatever_lands_and_whenever_answers_are_right(
    seed: int, windows: Sequence[tuple[int, int]]
) -> None:
    """Random prompts that share parts, several choices, cancels, preemption; late writes land in
    nobody's pages."""
    rng = random.Random(seed)
    host_slots = rng.choice([0, 60])
    fetcher = Bench(num_pages=rng.choice([60, 120]), host_slots=host_slots, windows=windows)
    holder = Bench(num_pages=60, host_slots=60, windows=windows)
    between = Between(fetcher, holder)
    bases = [prompt_of(rng, 60) for _ in range(4)]
    asked, cancelled, came = [], set(), 0
    open_: list[FetchWanted] = []
    quarantine: list[tuple[FetchWanted, int, bool]] = []
    for _ in range(150):
        base = rng.choice(bases)
        prompt = [*base[: rng.randrange(1, 60)], *prompt_of(rng, rng.randrange(1, 6))]
        if rng.random() < 0.4:
            held(holder, prompt)
        if rng.random() < 0.5:
            choices = rng.choice([1, 1, 1, 2])
            asked.append(ask(fetcher, prompt, rng.randrange(1, 20), choices=choices))
        if asked and rng.random() < 0.1:
            cancelled.add(asked[-1])
            fetcher.scheduler.requests.cancel(asked[-1])
        for _ in range(rng.randrange(3)):
            fetcher.turn()
        open_ += between.wanted
        between.wanted.clear()
        rng.shuffle(open_)
        while open_ and rng.random() < 0.5:
            wanted = open_.pop()
            landed, others = between.move(wanted, rng.choice([0, 2, 1000, 1000]))
            fetcher.scheduler.fetches.fetched(wanted.id, landed, others=others)
            fetcher.scheduler.check_invariants()
            quarantine.append((wanted, landed, others))
            came += landed * others
        while quarantine and rng.random() < 0.4:
            between.land_late(*quarantine.pop(0))
    assert came or host_slots
    for wanted in open_:
        fetcher.scheduler.fetches.fetched(wanted.id, 0)
        quarantine.append((wanted, 0, False))
    for _ in range(5000):
        fetcher.turn()
        for wanted in between.wanted:
            fetcher.scheduler.fetches.fetched(wanted.id, 0)
            fetcher.scheduler.fetches.freed(wanted.id)
        between.wanted.clear()
        if quarantine:
            between.land_late(*quarantine.pop(0))
        if not fetcher.scheduler.requests.by_id:
            break
    fetcher.run()
    for request_id in set(asked) - cancelled:
        fetcher.check_output(request_id)
    fetcher.check_baseline()
    holder.check_baseline()
