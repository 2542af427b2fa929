"""A quarantine whose question and answer do not get through: asked and answered by another path."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from kv_world import DECODE_EPOCH, Transfer, World

from faults import failpoints
from kv_transfer.events import (
    PeerFailed,
    QuiesceAnswered,
    QuiesceUnanswered,
    ReceiveFreed,
    SendFailed,
    SendQuiesced,
)
from kv_transfer.peers import DEAD_PEER_AGE_S, PARTED_S
from kv_transfer.receiving import ReceiveState
from kv_transfer.wire import Quiesce, Quiesced


@pytest.fixture
def cut(loopback: World) -> Iterator[World]:
    """Neither side can reach the other any more, and both live."""
    names = (side.name.rpartition("-")[0] for side in (loopback.prefill, loopback.decode))
    failpoints.arm(",".join(f"transfer.path=raise~{name}" for name in names))
    yield loopback
    failpoints.arm("")


def wait(world: World, seconds: float) -> None:
    for _ in range(round(seconds / 0.05)):
        world.clock.advance(0.05)
        world.turn()


def ask(world: World, transfer: Transfer, epoch: int = DECODE_EPOCH) -> list[QuiesceAnswered]:
    """As a router would; all that was answered so far."""
    world.prefill.exchange.quiesce(world.decode.name, Quiesce(transfer.id, epoch))
    world.turn()
    return world.prefill.of(QuiesceAnswered)


def answer(world: World, transfer: Transfer) -> None:
    world.decode.exchange.quiesced(world.prefill.name, Quiesced(transfer.id, DECODE_EPOCH))
    world.turn()


def test_a_cut_path_is_told_and_the_answer_frees(cut: World) -> None:
    world, transfer = cut, cut.grant(48)
    transfer.begin()
    transfer.finish()
    world.turn()
    assert world.prefill.of(SendFailed) == [SendFailed(transfer.id, "disconnected")]
    assert world.prefill.of(PeerFailed), "the pair is to be avoided"
    world.decode.receiver.abort(transfer.id)
    wait(world, 1.0)
    assert not world.decode.of(QuiesceUnanswered), "the direct path has its chance first"
    wait(world, 3.0)
    told = world.decode.of(QuiesceUnanswered)
    assert len(told) >= 2, "again, for as long as it takes"
    process = world.prefill.transport.endpoint.process
    assert process
    assert set(told) == {QuiesceUnanswered(transfer.id, world.prefill.name, (process,))}
    assert not world.decode.of(ReceiveFreed)
    answered = QuiesceAnswered(transfer.id, world.decode.name, DECODE_EPOCH)
    assert ask(world, transfer) == [answered]
    answer(world, transfer)
    assert world.decode.of(ReceiveFreed) == [ReceiveFreed(transfer.id)]
    answer(world, transfer)
    assert world.decode.of(ReceiveFreed) == [ReceiveFreed(transfer.id)]
    assert world.decode.counters.stale_notifications == 0, "a word that comes twice is expected"
    wait(world, 3.0)
    assert len(world.decode.of(QuiesceUnanswered)) == len(told)


def test_processes_are_known_as_long_as_the_peer_and_after_it(loopback: World) -> None:
    """A healthy peer is met once."""
    world, peers = loopback, loopback.decode.exchange.peers
    named = (world.prefill.transport.endpoint.process,)
    world.clock.advance(3 * DEAD_PEER_AGE_S)
    world.turn()
    assert peers.processes_of(world.prefill.name) == named
    world.decode.exchange.part(world.prefill.name, proven_dead=False)
    world.clock.advance(PARTED_S + 1)
    world.turn()
    assert not peers.any_known
    world.clock.advance(DEAD_PEER_AGE_S / 2)
    assert peers.processes_of(world.prefill.name) == named
    world.clock.advance(3 * DEAD_PEER_AGE_S)
    assert peers.processes_of(world.prefill.name) == ()


def test_no_answer_while_a_push_is_in_progress(loopback: World) -> None:
    world, transfer = loopback, loopback.grant(48)
    world.prefill.loopback.holds = True
    transfer.begin()
    transfer.compute(32)
    world.turn()
    world.decode.receiver.abort(transfer.id)
    assert not ask(world, transfer)
    (push,) = world.prefill.loopback.held_pushes
    assert not ask(world, transfer)
    world.prefill.loopback.land(push)
    world.prefill.exchange.turn()
    assert world.prefill.of(SendQuiesced)
    assert ask(world, transfer)


def test_a_pinned_send_is_never_answered_for(loopback: World) -> None:
    """Its push ended in an error: what of it still lands is unknown."""
    world, transfer = loopback, loopback.grant(48)
    world.prefill.loopback.holds = True
    transfer.begin()
    transfer.finish()
    world.turn()
    (push,) = world.prefill.loopback.held_pushes
    world.prefill.loopback.fail(push, lands=False)
    world.turn()
    world.decode.receiver.abort(transfer.id)
    assert not ask(world, transfer)
    assert world.decode.receiver.state(transfer.id) is ReceiveState.QUARANTINED


@pytest.mark.parametrize("who", ["epoch", "peer"])
def test_only_who_granted_can_ask(loopback: World, who: str) -> None:
    world, transfer = loopback, loopback.grant(48)
    transfer.begin()
    name = world.decode.name if who == "epoch" else "somebody"
    epoch = DECODE_EPOCH + (who == "epoch")
    world.prefill.exchange.quiesce(name, Quiesce(transfer.id, epoch))
    assert not world.prefill.of(QuiesceAnswered)
    assert world.prefill.counters.stale_notifications == 1
    transfer.finish()
    world.until(lambda: world.decode.receiver.state(transfer.id) is ReceiveState.READY)
    transfer.assert_delivered()


def test_only_the_granted_peer_can_answer(loopback: World) -> None:
    world, transfer = loopback, loopback.grant(48)
    world.prefill.loopback.close(world.decode.name)
    world.decode.receiver.abort(transfer.id)
    world.decode.exchange.quiesced("somebody", Quiesced(transfer.id, DECODE_EPOCH))
    world.decode.exchange.quiesced(world.prefill.name, Quiesced(transfer.id, DECODE_EPOCH + 1))
    assert not world.decode.of(ReceiveFreed)
    assert world.decode.counters.stale_notifications == 2


def test_an_answer_that_overtakes_what_has_landed(loopback: World) -> None:
    """The chunk's notification waits unread at the decode side: it is not a stale one."""
    world, transfer = loopback, loopback.grant(48)
    transfer.begin()
    transfer.compute(32)
    world.prefill.exchange.turn()
    world.prefill.exchange.turn()
    world.decode.receiver.abort(transfer.id)
    assert world.prefill.exchange.sender.give_up(
        world.decode.name, Quiesce(transfer.id, DECODE_EPOCH)
    )
    answer(world, transfer)
    assert world.decode.of(ReceiveFreed) == [ReceiveFreed(transfer.id)]
    world.turn(3)
    assert world.decode.counters.stale_notifications == 0
    assert np.array_equal(transfer.received()[:2], transfer.content[:2])
