"""A transfer as a fetch uses it: it may be short, and yields to hand-offs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kv_world import DECODE_EPOCH, PAGE_TOKENS, Transfer, World

from kv_transfer.events import Delivered, ReceiveAborted, ReceiveExpired, ReceiveFreed, Sent
from kv_transfer.receiving import ReceiveState
from kv_transfer.specs import SendSpec, Target
from kv_transfer.wire import Chunk, encode


def wanted(world: World, pages: int, timeout_s: float = 60.0) -> Transfer:
    """A fetch of so many pages that is expected."""
    transfer = world.grant_to_expect(pages * PAGE_TOKENS, timeout_s=timeout_s)
    world.decode.receiver.expect(replace(transfer.receive_spec, may_be_short=True))
    return transfer


def give(world: World, transfer: Transfer, pages: int) -> None:
    """The holder has only the first of the pages."""
    spec = transfer.spec
    short = SendSpec(
        transfer.id,
        spec.peer,
        spec.decode_epoch,
        [Target(transfer.target[:pages])],
        pages * PAGE_TOKENS,
        PAGE_TOKENS,
        yields=True,
    )
    world.prefill.sender.begin(short)
    world.prefill.sender.chunk_computed(transfer.id, pages * PAGE_TOKENS, b"", transfer.sources)


@pytest.mark.parametrize("pages", [1, 5])
def test_a_fetch_may_end_before_its_last_page(world: World, pages: int) -> None:
    transfer = wanted(world, 5)
    give(world, transfer, pages)
    world.until(lambda: bool(world.decode.of(Delivered)) and bool(world.prefill.of(Sent)))
    assert world.decode.of(Delivered)[0].num_pages == pages
    assert (transfer.received()[:pages] == transfer.content[:pages]).all()
    assert not transfer.received()[pages:].any()


def test_a_hand_off_may_not_be_short(loopback: World) -> None:
    transfer = loopback.grant(5 * PAGE_TOKENS)
    give(loopback, transfer, 3)
    loopback.settle()
    assert loopback.decode.receiver.state(transfer.id) is not ReceiveState.READY
    assert loopback.decode.counters.stale_notifications == 1


def test_the_end_stands_behind_all_that_has_landed(loopback: World) -> None:
    """Nobody makes such ends, and nothing is READY by them."""
    transfer = wanted(loopback, 5)

    def say(first: int, end: int, last: bool) -> None:
        chunk = Chunk(transfer.id, DECODE_EPOCH, first, end, end * PAGE_TOKENS, last)
        loopback.prefill.transport.notify(loopback.decode.name, encode(chunk))
        loopback.settle()

    say(3, 5, last=False)
    say(0, 2, last=True)
    assert loopback.decode.counters.stale_notifications == 1
    say(0, 3, last=False)
    say(5, 5, last=True)
    assert loopback.decode.receiver.state(transfer.id) is ReceiveState.READY


@pytest.mark.parametrize("expires", [True, False])
def test_what_has_landed_is_told_when_it_is_given_up(loopback: World, expires: bool) -> None:
    """The rest stays in quarantine until it lands, or never will."""
    loopback.prefill.sender._max_push_pages = [2]
    loopback.prefill.loopback.holds = True
    transfer = wanted(loopback, 5, timeout_s=1.0)
    give(loopback, transfer, 5)
    loopback.turn(5)
    first, *others = loopback.prefill.loopback.held_pushes
    loopback.prefill.loopback.land(first)
    loopback.turn(3)
    if expires:
        loopback.clock.advance(2.0)
        loopback.turn()
        assert loopback.decode.of(ReceiveExpired) == [ReceiveExpired(transfer.id, 2)]
    else:
        loopback.decode.receiver.abort(transfer.id)
        assert loopback.decode.of(ReceiveAborted)[0].landed_pages == 2
    assert not loopback.decode.of(ReceiveFreed)
    for push in others:
        loopback.prefill.loopback.land(push)
    loopback.turn(4)
    assert loopback.decode.of(ReceiveFreed)


def test_hand_offs_go_first(loopback: World) -> None:
    loopback.prefill.sender._max_push_pages = [1]
    fetch, hand_off = wanted(loopback, 3), loopback.grant(3 * PAGE_TOKENS)
    give(loopback, fetch, 3)
    hand_off.begin()
    hand_off.finish()
    order: list[bytes] = []
    push = loopback.prefill.loopback.push

    def noted(peer: str, source: np.ndarray, target: np.ndarray, payload: bytes, group: int) -> int:
        order.append(payload[4:20])
        return push(peer, source, target, payload, group)

    loopback.prefill.loopback.push = noted  # type: ignore[method-assign]
    loopback.until(lambda: len(loopback.decode.of(Delivered)) == 2)
    assert order == [hand_off.id] * 3 + [fetch.id] * 3
