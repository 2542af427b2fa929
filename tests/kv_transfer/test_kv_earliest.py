"""How often a decode worker looks for pages, and how late it sees them, on a virtual clock."""

from __future__ import annotations

import random

import pytest
from kv_world import FakeClock, World

from kv_transfer.events import Delivered
from kv_transfer.tables import ACTIVE_POLL_S, GROUP_S, RARE_POLL_S, EarliestEnds

TURN_S = 30e-6
"""Time of a look itself."""
PUSH_S = 4e-3
"""From the end of a prompt's last step to its last page."""


def hand_offs(
    rate: float, prompt_s: float, pages: int, cached: float = 0.0, count: int = 1000
) -> tuple[float, list[float]]:
    """Looks a second, and by hand-off how long after its end it was seen. Prompts come at random to
    a peer that computes them one after the other; it has a share of them in its cache."""
    clock, draw = FakeClock(), random.Random(1)
    began_s = clock()
    earliest = EarliestEnds(clock)
    grants, at_s, free_s = list[tuple[float, float, bytes]](), began_s, 0.0
    for number in range(count):
        at_s += draw.expovariate(rate)
        free_s = max(at_s, free_s) + prompt_s * (0.1 if draw.random() < cached else 1.0)
        grants.append((at_s, free_s + PUSH_S, number.to_bytes(16, "big")))
    looks, late_s, open_ = 0, list[float](), list[tuple[float, float, bytes]]()
    while grants or open_:
        pause_s = earliest.pause_s()
        next_s = float("inf") if pause_s is None else clock() + pause_s + TURN_S
        if grants and grants[0][0] <= next_s:
            clock.now_s = max(clock(), grants[0][0])
            open_.append(grants.pop(0))
            earliest.expect("p", open_[-1][2], pages)
        else:
            clock.now_s = next_s
        looks += 1
        for one in [one for one in open_ if one[1] <= clock()]:
            open_.remove(one)
            late_s.append(clock() - one[1])
            earliest.ended("p", one[2], complete=True)
    return looks / (clock() - began_s), sorted(late_s)


@pytest.mark.parametrize(("rate", "prompt_s", "pages"), [(24, 0.0225, 64), (3, 0.2, 500)])
def test_it_looks_half_as_often_and_sees_each_end_as_soon(
    rate: float, prompt_s: float, pages: int
) -> None:
    looks, late_s = hand_offs(rate, prompt_s, pages)
    assert looks < 1400  # 2,500 if it looks every 200 us for as long as a grant is open.
    assert late_s[-1] <= ACTIVE_POLL_S + TURN_S + 1e-9


def test_what_is_faster_than_all_before_is_seen_a_little_later() -> None:
    _, late_s = hand_offs(24, 0.0225, 64, cached=0.1)
    assert late_s[-1] <= RARE_POLL_S + TURN_S + 1e-9
    assert late_s[int(0.99 * len(late_s))] <= ACTIVE_POLL_S + TURN_S + 1e-9


def test_a_fetch_is_looked_for_at_once_and_puts_no_prompt_off() -> None:
    clock = FakeClock()
    earliest = EarliestEnds(clock)
    earliest.expect("p", b"first", 10)
    clock.advance(1.0)
    earliest.ended("p", b"first", complete=True)
    earliest.expect("p", b"prompt", 10)
    assert earliest.pause_s() == ACTIVE_POLL_S
    clock.advance(0.5)
    assert earliest.pause_s() == RARE_POLL_S
    earliest.expect("p", b"fetch", 0)
    assert earliest.pause_s() == ACTIVE_POLL_S
    earliest.ended("p", b"fetch", complete=True)
    assert earliest.pause_s() == RARE_POLL_S
    clock.advance(0.301)  # 0.8 of what the first one took since the grant, and not since the fetch.
    assert earliest.pause_s() == ACTIVE_POLL_S
    earliest.ended("p", b"prompt", complete=False)
    assert earliest.pause_s() is None


def test_prompts_that_end_together_are_seen_at_once_and_show_no_pace() -> None:
    clock = FakeClock()
    earliest = EarliestEnds(clock)
    for step in range(3):
        for name in (b"one", b"other"):
            earliest.expect("p", name, 10)
        clock.advance(1.0)
        earliest.ended("p", b"one", complete=True)
        clock.advance(GROUP_S / 3)
        assert earliest.pause_s() == ACTIVE_POLL_S
        earliest.ended("p", b"other", complete=True)
        if step:
            earliest.expect("p", b"next", 10)
            clock.advance(0.5)
            assert earliest.pause_s() == RARE_POLL_S
            earliest.ended("p", b"next", complete=False)


def test_an_exchange_pauses_by_the_pace_of_its_peer(world: World) -> None:
    first = world.grant(160)
    world.clock.advance(1.0)
    first.begin()
    first.finish()
    world.until(lambda: bool(world.decode.of(Delivered)))
    world.grant(160)
    world.clock.advance(0.5)
    assert world.decode.exchange.pause_s() == RARE_POLL_S
    world.clock.advance(0.4)
    assert world.decode.exchange.pause_s() == ACTIVE_POLL_S
