"""A transfer as a fetch uses it: it may be short, yields to hand-offs, may leave host slots."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kv_world import DECODE_EPOCH, PAGE_BYTES, PAGE_TOKENS, Transfer, World, a_world

from kv_transfer.events import Delivered, ReceiveAborted, ReceiveExpired, ReceiveFreed, Sent
from kv_transfer.receiving import ReceiveState
from kv_transfer.specs import SendSpec
from kv_transfer.transports.factory import FROM_SLOTS, make_transport
from kv_transfer.types import PushState
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
        spec.source_pages[:pages],
        spec.target_pages[:pages],
        0,
        pages * PAGE_TOKENS,
        PAGE_TOKENS,
        yields=True,
    )
    world.prefill.sender.begin(short)
    world.prefill.sender.chunk_computed(transfer.id, pages * PAGE_TOKENS, b"")


@pytest.mark.parametrize("pages", [1, 3, 5])
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
    loopback.prefill.sender._max_push_pages = 2
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
    loopback.prefill.sender._max_push_pages = 1
    fetch, hand_off = wanted(loopback, 3), loopback.grant(3 * PAGE_TOKENS)
    give(loopback, fetch, 3)
    hand_off.begin()
    hand_off.finish()
    order: list[bytes] = []
    push = loopback.prefill.loopback.push

    def noted(peer: str, source: np.ndarray, target: np.ndarray, payload: bytes) -> int:
        order.append(payload[4:20])
        return push(peer, source, target, payload)

    loopback.prefill.loopback.push = noted  # type: ignore[method-assign]
    loopback.until(lambda: len(loopback.decode.of(Delivered)) == 2)
    assert order == [hand_off.id] * 3 + [fetch.id] * 3


@pytest.mark.parametrize("kind", sorted(FROM_SLOTS))
def test_pages_leave_the_pool_and_host_slots_in_one_transfer(kind: str) -> None:
    """Slots are longer than pages: only a page's bytes move."""
    with a_world(kind, met=False) as world:
        side = world.prefill
        slots = torch.randint(1, 255, (16, 2 * PAGE_BYTES), dtype=torch.uint8)
        side.transport.shutdown()
        name = f"{side.name}-slots"
        side.pool.random_(1, 255)
        transport = make_transport(kind, name, side.pool, PAGE_BYTES, len(side.pool), slots)
        world.decode.transport.open(transport.endpoint)
        transport.open(world.decode.transport.endpoint)
        first = len(side.pool)
        for source, target in (([3, 4], [1, 2]), ([first + 5, first + 6, first + 1], [3, 4, 9])):
            sent, got = np.array(source, np.int32), np.array(target, np.int32)
            handle = transport.push(world.decode.name, sent, got, b"")
            ended: list[tuple[int, PushState]] = []
            while not ended:
                ended = transport.poll_pushes()
                world.decode.transport.poll_notifications()
            assert ended == [(handle, PushState.DONE)]
        pool = world.decode.pool
        assert torch.equal(pool[[1, 2]], side.pool[[3, 4]])
        assert torch.equal(pool[[3, 4, 9]], slots[[5, 6, 1], :PAGE_BYTES])
        transport.shutdown()
        side.transport = make_transport(kind, side.name, side.pool, PAGE_BYTES, len(side.pool))


def test_a_push_is_from_one_region(loopback: World) -> None:
    transfer = wanted(loopback, 5)
    pushed: list[list[int]] = []
    loopback.prefill.loopback._slots = torch.zeros(8, PAGE_BYTES, dtype=torch.uint8)
    first, push = len(loopback.prefill.pool), loopback.prefill.loopback.push

    def noted(peer: str, source: np.ndarray, target: np.ndarray, payload: bytes) -> int:
        pushed.append(source.tolist())
        return push(peer, source, target, payload)

    loopback.prefill.loopback.push = noted  # type: ignore[method-assign]
    transfer.source = np.array([1, first + 2, first + 3, 4, 5], np.int32)
    give(loopback, transfer, 5)
    loopback.until(lambda: bool(loopback.decode.of(Delivered)))
    assert pushed == [[1], [first + 2, first + 3], [4, 5]]
