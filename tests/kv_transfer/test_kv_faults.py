"""Aborts, errors and deaths with a push in progress: loopback, where the test ends each push."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kv_world import DECODE_EPOCH, Transfer, World

from kv_transfer.events import (
    Delivered,
    PeerFailed,
    PeerOpened,
    ReceiveFreed,
    SendFailed,
    SendQuiesced,
    Sent,
)
from kv_transfer.exchange import ACTIVE_POLL_S, FRESH_POLL_S, FRESH_S, IDLE_POLL_S
from kv_transfer.outgoing import SendState
from kv_transfer.peers import PARTED_S
from kv_transfer.receiving import ReceiveState
from kv_transfer.settling_writes import LONGEST_TURN_S, SETTLING_S
from kv_transfer.tables import BoundedMemory, Timers
from kv_transfer.types import TransportError
from kv_transfer.wire import Chunk, Quiesce, decode


@pytest.fixture
def world(loopback: World) -> World:
    """Over loopback alone."""
    return loopback


def hold(world: World) -> None:
    world.prefill.loopback.holds = True


def pushing(world: World) -> Transfer:
    """A transfer whose first pages are in a push that goes on."""
    hold(world)
    transfer = world.begun(48)
    transfer.compute(32)
    world.turn()
    return transfer


def test_quiesced_is_said_only_when_every_push_has_ended(world: World) -> None:
    hold(world)
    transfer = world.begun(100)
    for end_token in (32, 64):
        transfer.compute(end_token)
        world.turn()
    first, second = world.prefill.loopback.held_pushes
    world.decode.receiver.abort(transfer.id)
    world.turn(5)
    assert world.prefill.sender.state(transfer.id) is SendState.QUIESCING
    transfer.finish()
    world.turn(5)
    assert world.prefill.loopback.held_pushes == [first, second], "posted after the abort"
    world.prefill.loopback.land(second)
    world.turn(5)
    assert not world.prefill.of(SendQuiesced)
    assert not world.decode.of(ReceiveFreed)
    world.prefill.loopback.land(first)
    world.turn(5)
    assert world.prefill.of(SendQuiesced)
    assert world.decode.of(ReceiveFreed)


def test_a_late_final_notification_counts_as_quiesced(world: World) -> None:
    hold(world)
    transfer = world.sent(48)
    world.turn()
    world.decode.receiver.abort(transfer.id)
    (push,) = world.prefill.loopback.held_pushes
    world.prefill.loopback.land(push)
    world.decode.exchange.turn()
    assert world.decode.of(ReceiveFreed) == [ReceiveFreed(transfer.id)]
    assert not world.decode.of(Delivered)
    world.turn(5)
    assert world.prefill.sender.state(transfer.id) in (SendState.QUIESCED, SendState.DELIVERED)
    assert world.decode.counters.stale_notifications == 0, "the late answer is expected"


def test_the_question_is_repeated_with_backoff_for_as_long_as_it_takes(world: World) -> None:
    world.settle()
    transfer = world.grant(48)
    world.decode.receiver.abort(transfer.id)
    asked = []
    for _ in range(300):
        for notification in world.prefill.transport.poll_notifications():
            assert decode(notification.payload) == Quiesce(transfer.id, DECODE_EPOCH)
            asked.append(world.clock.now_s)
        world.clock.advance(0.01)
        world.decode.exchange.turn()
    gaps = np.diff(asked)
    assert gaps[0] == pytest.approx(0.02, abs=0.011)
    assert (np.diff(gaps) > -0.02).all()
    assert gaps.max() <= 1.02
    assert world.decode.receiver.state(transfer.id) is ReceiveState.QUARANTINED
    world.clock.advance(1.0)
    world.turn(2)
    assert world.decode.of(ReceiveFreed)


@pytest.mark.parametrize("lands", [True, False])
def test_an_error_pins_until_the_peer_is_proven_dead(world: World, lands: bool) -> None:
    hold(world)
    transfer = world.sent(48)
    world.turn()
    (push,) = world.prefill.loopback.held_pushes
    world.prefill.loopback.fail(push, lands)
    world.turn(3)
    assert world.prefill.of(SendFailed) == [SendFailed(transfer.id, "push_error")]
    assert world.prefill.of(PeerFailed) == [PeerFailed(world.decode.name, "push_error")]
    assert bool(world.decode.of(Delivered)) is lands, "what landed whole is READY all the same"
    world.decode.receiver.abort(transfer.id)
    world.prefill.sender.abort(transfer.id)
    world.prefill.exchange.meet(world.decode.transport.endpoint)
    for _ in range(5):
        world.clock.advance(5000.0)
        world.turn(2)
    assert not world.prefill.of(SendQuiesced)
    assert not world.decode.of(ReceiveFreed)
    world.prefill.exchange.part(world.decode.name, proven_dead=False)
    world.turn(2)
    assert not world.prefill.of(SendQuiesced)
    world.die(world.decode, at=world.prefill)
    assert world.prefill.of(SendQuiesced) == [SendQuiesced(transfer.id)]


def test_what_a_dead_peer_had_posted_lands_in_nobodys_pages(world: World) -> None:
    """It lies in a socket until this side takes it, which it does not while it stands still."""
    transfer = pushing(world)
    world.decode.receiver.abort(transfer.id)
    world.decode.exchange.part(world.prefill.name, proven_dead=True)
    world.decode.exchange.turn()
    world.clock.advance(3600.0)
    for _ in range(round(SETTLING_S / LONGEST_TURN_S) - 2):
        world.decode.exchange.turn()
        assert not world.decode.of(ReceiveFreed)
        world.clock.advance(LONGEST_TURN_S)
    world.prefill.loopback.land(world.prefill.loopback.held_pushes[0])
    world.die(world.prefill, at=world.decode)
    assert world.decode.of(ReceiveFreed) == [ReceiveFreed(transfer.id)]


def test_nor_where_the_death_is_seen_before_the_grant_that_it_wrote_to(world: World) -> None:
    """The grant was told while the transfer thread was busy: its `expect` comes after the proof."""
    hold(world)
    transfer = world.grant_to_expect(48)
    transfer.begin()
    transfer.compute(32)
    world.turn()
    world.decode.exchange.part(world.prefill.name, proven_dead=True)
    transfer.expect()
    world.decode.receiver.abort(transfer.id)
    world.decode.exchange.turn()
    assert not world.decode.of(ReceiveFreed), "the write may still land"
    world.prefill.loopback.land(world.prefill.loopback.held_pushes[0])
    world.die(world.prefill, at=world.decode)
    assert world.decode.of(ReceiveFreed) == [ReceiveFreed(transfer.id)]


def test_a_peer_that_dies_under_a_push(world: World) -> None:
    transfer = pushing(world)
    world.die(world.decode, at=world.prefill)
    assert world.prefill.of(SendFailed) == [SendFailed(transfer.id, "peer_dead")]
    assert world.prefill.of(SendQuiesced) == [SendQuiesced(transfer.id)]
    assert world.prefill.counters.sends_in_progress == 0
    world.prefill.loopback.land(world.prefill.loopback.held_pushes[0])
    world.turn(2)
    assert len(world.prefill.of(SendQuiesced)) == 1


def test_a_lost_peer_fails_its_sends_and_opens_anew(world: World) -> None:
    hold(world)
    broken, other = world.grant(48), world.grant(48)
    for transfer in (broken, other):
        transfer.begin()
        transfer.compute(32)
        world.turn()
    first, second = world.prefill.loopback.held_pushes
    world.prefill.loopback.fail(first, lands=False)
    world.turn()
    assert world.prefill.of(SendFailed)[1] == SendFailed(other.id, "peer_lost")
    assert not world.prefill.of(SendQuiesced)
    world.prefill.loopback.land(second)
    world.turn()
    assert world.prefill.of(SendQuiesced) == [SendQuiesced(other.id)]
    world.prefill.loopback.holds = False
    opened = len(world.prefill.of(PeerOpened))
    world.prefill.exchange.meet(world.decode.transport.endpoint)
    world.turn(5)
    assert len(world.prefill.of(PeerOpened)) == opened + 1
    again = world.sent(48)
    world.turn(5)
    again.assert_delivered()


def test_a_lost_path_is_tried_again_and_quarantine_ends_over_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = world.begun(48)
    world.turn(3)

    def cut(*_: object) -> int:
        raise TransportError("disconnected", "")

    with monkeypatch.context() as patch:
        patch.setattr(world.decode.transport, "notify", cut)
        patch.setattr(world.decode.transport, "push", cut)
        world.decode.receiver.abort(transfer.id)
        assert world.decode.of(PeerFailed) == [PeerFailed(world.prefill.name, "disconnected")]
        for _ in range(10):
            world.clock.advance(7.0)
            world.turn()
        assert len(world.decode.of(PeerFailed)) == 1, "told once"
        assert world.decode.counters.quarantined_transfers == 1
    opened = len(world.decode.of(PeerOpened))
    world.clock.advance(31.0)
    world.until(lambda: len(world.decode.of(PeerOpened)) == opened + 1)
    world.clock.advance(1.0)
    world.until(lambda: world.decode.of(ReceiveFreed) == [ReceiveFreed(transfer.id)])


def test_an_exception_nobody_foresaw_pins_and_the_rest_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def explode(*_: object) -> int:
        raise ValueError("secret prompt")

    transfer = world.sent(48)
    with monkeypatch.context() as patch:
        patch.setattr(world.prefill.transport, "push", explode)
        world.turn()
    assert world.prefill.of(SendFailed) == [SendFailed(transfer.id, "internal")]
    assert world.prefill.sender.state(transfer.id) is SendState.FAILED
    assert "secret prompt" not in caplog.text
    assert "ValueError" in caplog.text
    other = world.sent(48)
    world.turn(3)
    other.assert_delivered()


def test_a_refused_push_fails_and_quiesces_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(*_: object) -> int:
        raise TransportError("disconnected", "")

    transfer = world.sent(48)
    monkeypatch.setattr(world.prefill.transport, "push", refuse)
    world.turn(2)
    assert world.prefill.of(SendFailed) == [SendFailed(transfer.id, "disconnected")]
    assert world.prefill.of(SendQuiesced) == [SendQuiesced(transfer.id)]
    assert world.prefill.of(PeerFailed) == [PeerFailed(world.decode.name, "disconnected")]


def test_a_failing_callback_does_not_stop_the_exchange(world: World) -> None:
    seen = []

    def on_event(event: object) -> None:
        seen.append(event)
        raise RuntimeError

    world.decode.exchange._on_event = on_event
    for _ in range(2):
        world.sent(48)
        world.turn(3)
    assert len(seen) == 2


def test_a_self_test_that_hangs_does_not_hold_up_the_peer(world: World) -> None:
    world.prefill.exchange.peers.close(world.decode.name)
    world.prefill.events.clear()
    hold(world)
    world.prefill.exchange.meet(world.decode.transport.endpoint)
    assert world.prefill.exchange.peers.is_open(world.decode.name)
    world.turn()
    assert not world.prefill.of(PeerOpened)
    world.clock.advance(0.06)
    world.turn()
    (opened,) = world.prefill.of(PeerOpened)
    assert opened.gigabytes_per_s == 0
    world.prefill.loopback.fail(world.prefill.loopback.held_pushes[0], lands=False)
    world.turn()
    assert world.prefill.of(PeerFailed)[-1].cause == "self_test_failed"


def test_meeting_again_repeats_the_answer_without_a_test(world: World) -> None:
    opened = world.prefill.of(PeerOpened)
    world.prefill.exchange.meet(world.decode.transport.endpoint)
    assert world.prefill.of(PeerOpened) == opened * 2
    assert opened[0].gigabytes_per_s > 0


def test_a_parted_peer_is_forgotten_long_after(world: World) -> None:
    transfer = world.grant(48, timeout_s=10 * PARTED_S)
    world.decode.exchange.part(world.prefill.name, proven_dead=False)
    world.clock.advance(PARTED_S + 1)
    world.turn()
    assert world.decode.exchange.peers.is_open(world.prefill.name), "a grant still needs it"
    world.decode.receiver.abort(transfer.id)
    world.turn(3)
    assert not world.decode.exchange.peers.is_open(world.prefill.name)


def test_how_long_the_thread_may_pause(world: World) -> None:
    assert world.decode.exchange.pause_s() == IDLE_POLL_S
    transfer = world.grant(48)
    assert world.decode.exchange.pause_s() == ACTIVE_POLL_S
    hold(world)
    transfer.begin()
    assert world.prefill.exchange.pause_s() == IDLE_POLL_S
    transfer.finish()
    assert world.prefill.exchange.pause_s() == 0
    world.turn()
    assert world.prefill.exchange.pause_s() == FRESH_POLL_S
    world.clock.advance(FRESH_S)
    assert world.prefill.exchange.pause_s() == ACTIVE_POLL_S, "it waits for somebody"
    world.prefill.loopback.land(world.prefill.loopback.held_pushes[0])
    world.turn(2)
    assert world.decode.exchange.pause_s() == IDLE_POLL_S


def test_long_pushes_are_cut_and_transfers_take_turns(world: World) -> None:
    hold(world)
    world.prefill.sender._max_push_pages = [4]
    transfers = [world.grant(160) for _ in range(2)]
    for transfer in transfers:
        transfer.begin()
        transfer.finish()
    posted = []
    for _ in range(6):
        world.prefill.exchange.turn()
        posted.append([t.id for t in transfers if len(world.prefill.sender._sends[t.id].handles)])
    assert [len(ids) for ids in posted[:2]] == [1, 2]
    world.prefill.loopback.holds = False
    world.turn(3)
    stats = [event.stats for event in world.prefill.of(Sent)]
    assert [(s.pushes, s.pages) for s in stats] == [(3, 10), (3, 10)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"decode_epoch": DECODE_EPOCH + 1},
        {"transfer_id": bytes(16)},
        {"end_page": 4},
        {"end_page": 2},
        {"end_token": 47},
        {"last": False, "end_page": 0},
    ],
    ids=str,
)
def test_a_notification_that_no_grant_allows_counts_for_nothing(
    world: World, wrong: dict[str, Any]
) -> None:
    """Of another life, of another transfer, of other pages; nor does that of another peer."""
    transfer = world.grant(48)
    right = Chunk(transfer.id, DECODE_EPOCH, 0, 3, 48, last=True)
    receiver, peer = world.decode.receiver, world.prefill.name
    receiver.on_chunk(peer, replace(right, **wrong))
    receiver.on_chunk("somebody", right)
    assert receiver.state(transfer.id) is ReceiveState.GRANTED
    assert world.decode.counters.stale_notifications == 2
    receiver.on_chunk(peer, right)
    assert receiver.state(transfer.id) is ReceiveState.READY


def test_memory_keeps_what_may_be_asked_for_and_is_bounded() -> None:
    rng, now_s = random.Random(5), 0.0
    memory: BoundedMemory[int, int] = BoundedMemory(8, 10.0, lambda: now_s)
    added: dict[int, tuple[int, float]] = {}
    """Key to value and time, the latest last."""
    for value in range(3000):
        now_s += rng.choice([0.0, 0.1, 2.0]) if rng.random() < 0.99 else 25.0
        key = rng.randrange(40)
        added.pop(key, None)
        added[key] = (value, now_s)
        memory.add(key, value)
        assert len(memory) <= 16
        for known, (wanted, at_s) in list(added.items())[-8:]:
            assert now_s - at_s >= 10.0 or memory.get(known) == wanted
            assert memory.get(known) in (wanted, None)
            assert (known in memory) == (memory.get(known) is not None)
    now_s += 30.0
    assert memory.get(key) is None
    assert len(memory) == 0


def test_what_is_remembered_of_a_transfer_is_small() -> None:
    """A worker remembers each of its transfers for an hour."""
    count = 20_000
    memory: BoundedMemory[bytes, ReceiveState] = BoundedMemory(1 << 18, 3600.0, time.monotonic)
    gc.collect()
    tracked = len(gc.get_objects())
    tracemalloc.start()
    try:
        for number in range(count):
            memory.add(number.to_bytes(16, "big"), ReceiveState.READY)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 100 * count
    finally:
        tracemalloc.stop()
    assert len(gc.get_objects()) - tracked < count // 10


def test_timers_fire_in_order() -> None:
    now_s = 0.0
    timers = Timers(lambda: now_s)
    timers.set(b"b", 2.0)
    timers.set(b"a", 1.0)
    assert timers.next_after_s() == 1.0
    assert timers.pop_due() == []
    now_s = 2.5
    assert timers.next_after_s() == 0.0
    assert timers.pop_due() == [b"a", b"b"]
    assert timers.next_after_s() is None
