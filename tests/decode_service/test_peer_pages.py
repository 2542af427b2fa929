"""What one peer may hold of the pool, and what waits for it."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from worker_kit import PAGE_BYTES, Attempted, a_pair, until

from decode_service.peer_pages import MAX_PASSED_OVER, PeerPages


def test_grants_beyond_the_share_wait_their_turn() -> None:
    pages = PeerPages(10)
    assert pages.take(b"a", "p0", 6)
    assert not pages.take(b"b", "p0", 5)
    assert pages.take(b"c", "p1", 5)
    assert pages.take(b"d", "p0", 4)
    assert not pages.take(b"resumed", "p0", 3, first=True)
    assert list(pages.give_back(b"d")) == [b"resumed"]
    assert list(pages.give_back(b"a")) == [b"b"]
    assert pages.held_by("p0") == 8


def test_one_that_is_longer_than_the_share_goes_alone() -> None:
    pages = PeerPages(10)
    assert pages.take(b"long", "p0", 30)
    assert not pages.take(b"short", "p0", 1)
    assert list(pages.give_back(b"long")) == [b"short"]


def test_one_that_waits_is_passed_a_bounded_number_of_times() -> None:
    pages = PeerPages(10)
    assert pages.take(b"0", "p0", 4)
    assert not pages.take(b"large", "p0", 10)
    number = 0
    while pages.take(b"%d" % (number + 1), "p0", 4):
        assert not list(pages.give_back(b"%d" % number))
        number += 1
    assert number == MAX_PASSED_OVER
    assert pages.take(b"other", "p1", 4), "another peer's do not wait for it"
    assert list(pages.give_back(b"%d" % number)) == [b"large"]
    assert list(pages.give_back(b"large")) == [b"%d" % (number + 1)]


def test_who_waits_for_one_that_gives_up_waits_no_longer() -> None:
    pages = PeerPages(10)
    assert pages.take(b"holds", "p0", 4)
    assert not pages.take(b"large", "p0", 10)
    for _ in range(MAX_PASSED_OVER):
        assert pages.take(b"small", "p0", 4)
        assert not list(pages.give_back(b"small"))
    assert not pages.take(b"small", "p0", 4)
    assert list(pages.give_back(b"large")) == [b"small"]


def test_one_that_gave_up_waiting_is_forgotten() -> None:
    pages = PeerPages(10)
    pages.take(b"a", "p0", 10)
    pages.take(b"b", "p0", 5)
    assert not list(pages.give_back(b"b"))
    assert not list(pages.give_back(b"a"))
    assert pages.held_by("p0") == 0


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_over_the_share_and_nobody_is_left_waiting(seed: int) -> None:
    rng = random.Random(seed)
    pages = PeerPages(16)
    sizes = {bytes([i]): (f"p{i % 3}", rng.randrange(1, 24)) for i in range(60)}
    granted: set[bytes] = set()
    for name, (peer, size) in sizes.items():
        if pages.take(name, peer, size, first=rng.random() < 0.2):
            granted.add(name)
        if granted and rng.random() < 0.4:
            over = rng.choice(sorted(granted))
            granted.remove(over)
            granted.update(pages.give_back(over))
        held: defaultdict[str, list[int]] = defaultdict(list)
        for one in granted:
            held[sizes[one][0]].append(sizes[one][1])
        for peer_name, many in held.items():
            assert pages.held_by(peer_name) == sum(many)
            assert sum(many) <= 16 or len(many) == 1
    seen = set(granted)
    while granted:
        over = granted.pop()
        more = set(pages.give_back(over))
        granted |= more
        seen |= more
    assert all(pages.held_by(f"p{i}") == 0 for i in range(3))


async def test_a_frozen_peer_keeps_its_share_and_no_more() -> None:
    """It holds pushes that do not end: what it was granted is quarantined, what it was not is
    granted when it has given back, and meanwhile the router is told to avoid it."""
    async with a_pair(d_max_bytes_per_peer=8 * PAGE_BYTES) as pair:
        pair.p.transport.holds = True
        stuck = [Attempted(32, max_tokens=3) for _ in range(2)]  # 8 pages of 4 tokens each
        for attempt in stuck:
            pair.submit(attempt)
        await pair.forward_grant(stuck[0])
        await until(lambda: pair.p.transport.held_pushes)
        await until(lambda: pair.d.engine.load().granted_pages == stuck[0].num_pages)
        assert not pair.from_d.all("granted", stuck[1].id)
        pair.d.decode.cancel(stuck[0].id, pair.from_d.outbox)
        await until(lambda: pair.d.engine.load().quarantined_pages == stuck[0].num_pages)
        assert pair.d.decode.stats.crowding_peers() == [pair.p.name]
        assert not pair.from_d.all("granted", stuck[1].id)
        pair.p.transport.holds = False
        pair.p.prefill.cancel(stuck[0].id, pair.from_p.outbox)
        await pair.forward_grant(stuck[1])
        await pair.from_d.heard("finished", stuck[1].id)
        assert pair.d.decode.stats.crowding_peers() == []
        await pair.quiet()
