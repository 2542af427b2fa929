"""The protocol's happy paths and fences, the same on every transport."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from kv_world import DECODE_EPOCH, KINDS, NUM_PAGES, PAGE_TOKENS, World, a_world
from waiting import wait_until

from kv_transfer.events import (
    Delivered,
    PeerFailed,
    PeerOpened,
    ReceiveAborted,
    ReceiveExpired,
    ReceiveFreed,
    SendFailed,
    SendQuiesced,
    Sent,
)
from kv_transfer.outgoing import SendState
from kv_transfer.peers import SELF_TEST_BYTES, SELF_TEST_S
from kv_transfer.receiving import ReceiveState
from kv_transfer.specs import Target
from kv_transfer.types import Notification
from kv_transfer.wire import Chunk, Quiesce, Quiesced, decode, encode


def delivered(world: World, transfers: int = 1) -> Delivered:
    world.until(
        lambda: (
            len(world.decode.of(Delivered)) == transfers
            and len(world.prefill.of(Sent)) == transfers
        )
    )
    return world.decode.of(Delivered)[-1]


@pytest.mark.parametrize("num_tokens", [1, 16, 333])
def test_scattered_pages_arrive_byte_for_byte(world: World, num_tokens: int) -> None:
    transfer = world.sent(num_tokens)
    event = delivered(world)
    transfer.assert_delivered()
    assert event.transfer_id == transfer.id
    assert event.payload == b"first tokens"
    assert event.send_span_id == b"spanspan"
    assert event.granted_ns <= event.first_notification_ns <= event.delivered_ns
    (sent,) = world.prefill.of(Sent)
    assert sent.stats.pages == len(transfer.target)
    assert sent.stats.started_ns <= sent.stats.last_posted_ns <= sent.stats.done_ns
    assert world.prefill.counters.bytes_sent == sent.stats.bytes
    assert world.decode.counters.stale_notifications == 0


def test_adjacent_pages_are_one_descriptor(world: World) -> None:
    transfer = world.sent(20 * PAGE_TOKENS, merged=True)
    delivered(world)
    transfer.assert_delivered()
    assert world.prefill.of(Sent)[0].stats.descriptors == 1


def test_full_pages_leave_while_the_rest_is_computed(world: World) -> None:
    transfer = world.begun(100)
    for end_token in (40, 80):
        transfer.compute(end_token)
        full = end_token // PAGE_TOKENS
        world.until(lambda: bool((transfer.received()[:full] == transfer.content[:full]).all()))
        world.settle()
        assert not transfer.received()[full:].any(), "a page left before it was final"
        world.until(lambda: world.decode.receiver.state(transfer.id) is ReceiveState.FILLING)
    transfer.compute()
    world.settle()
    assert not world.decode.of(Delivered), "READY without the last notification"
    transfer.finish()
    assert delivered(world).notifications >= 3
    transfer.assert_delivered()


@pytest.mark.parametrize("held_pages", [1, 7])
def test_held_pages_are_not_sent(world: World, held_pages: int) -> None:
    transfer = world.begun(100, held_pages=held_pages)
    transfer.compute(40)
    world.turn(3)
    transfer.finish()
    event = delivered(world)
    transfer.assert_delivered()
    assert event.payload == b"first tokens"
    assert world.prefill.of(Sent)[0].stats.pages == 7 - held_pages


def test_notifications_that_are_not_ours_are_dropped_and_counted(loopback: World) -> None:
    transfer = loopback.grant(100)
    pages, tokens = len(transfer.target), transfer.num_tokens
    forged = [
        b"",
        b"not ours at all",
        encode(Chunk(bytes(16), DECODE_EPOCH, 0, 1, 16)),
        encode(Chunk(transfer.id, DECODE_EPOCH + 1, 0, 1, 16)),
        encode(Chunk(transfer.id, DECODE_EPOCH, 0, pages + 1, tokens)),
        encode(Chunk(transfer.id, DECODE_EPOCH, 2, 2, 32)),
        encode(Chunk(transfer.id, DECODE_EPOCH, 0, pages - 1, tokens, last=True)),
        encode(Chunk(transfer.id, DECODE_EPOCH, 0, pages, tokens - 1, last=True)),
        encode(Quiesced(bytes(16), DECODE_EPOCH)),
        encode(Quiesced(transfer.id, DECODE_EPOCH + 1)),
    ]
    sent = [data for data in forged if data]
    for data in sent:
        loopback.prefill.transport.notify(loopback.decode.name, data)
    loopback.until(lambda: loopback.decode.counters.stale_notifications == len(sent))
    assert loopback.decode.receiver.state(transfer.id) is ReceiveState.GRANTED
    transfer.begin()
    transfer.finish()
    delivered(loopback)
    transfer.assert_delivered()


@pytest.mark.parametrize("computed_tokens", [None, 0, 40])
def test_abort_by_the_decode_side(world: World, computed_tokens: int | None) -> None:
    """Ungranted, granted, and with some pages over there."""
    transfer = world.grant(100)
    if computed_tokens is not None:
        transfer.begin()
        transfer.compute(computed_tokens)
        world.settle()
    world.decode.receiver.abort(transfer.id)
    assert world.decode.of(ReceiveAborted) == [ReceiveAborted(transfer.id, already_ready=False)]
    assert not world.decode.of(ReceiveFreed), "freed before the prefill side quiesced"
    assert world.decode.counters.quarantined_transfers == 1
    world.until(lambda: bool(world.decode.of(ReceiveFreed)))
    assert world.decode.counters.quarantined_transfers == 0
    if computed_tokens is not None:
        assert world.prefill.of(SendQuiesced) == [SendQuiesced(transfer.id)]
    transfer.finish()
    transfer.begin()
    world.settle()
    full = (computed_tokens or 0) // PAGE_TOKENS
    assert not transfer.received()[full:].any(), "pushed after the abort"
    assert world.prefill.of(SendQuiesced)[-1] == SendQuiesced(transfer.id)
    assert world.prefill.sender.state(transfer.id) is SendState.QUIESCED


def test_abort_of_a_transfer_never_heard_of(loopback: World) -> None:
    transfer = loopback.grant(100)
    loopback.prefill.sender.abort(transfer.id)
    assert loopback.prefill.of(SendQuiesced) == [SendQuiesced(transfer.id)]
    transfer.begin()
    transfer.finish()
    loopback.settle()
    assert not loopback.decode.of(Delivered)
    loopback.decode.receiver.abort(b"u" * 16)
    assert loopback.decode.of(ReceiveFreed) == [ReceiveFreed(b"u" * 16)]


def test_expiry_is_a_timeout_and_no_fence(loopback: World) -> None:
    transfer = loopback.begun(100, timeout_s=30.0)
    transfer.compute(40)
    loopback.settle()
    loopback.clock.advance(29.0)
    loopback.turn()
    assert not loopback.decode.of(ReceiveExpired)
    loopback.clock.advance(2.0)
    loopback.decode.exchange.turn()
    assert loopback.decode.of(ReceiveExpired) == [ReceiveExpired(transfer.id)]
    assert loopback.decode.counters.expired_grants == 1
    assert loopback.decode.receiver.state(transfer.id) is ReceiveState.QUARANTINED
    loopback.until(lambda: bool(loopback.decode.of(ReceiveFreed)))
    assert loopback.prefill.of(SendQuiesced)


def test_a_peer_that_left_still_answers(loopback: World) -> None:
    transfer = loopback.begun(100)
    loopback.prefill.exchange.part(loopback.decode.name, proven_dead=False)
    loopback.decode.exchange.part(loopback.prefill.name, proven_dead=False)
    loopback.decode.receiver.abort(transfer.id)
    loopback.until(lambda: bool(loopback.decode.of(ReceiveFreed)))


def have_come(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill side's words have come, all of them, and are there to be polled."""
    came: list[Notification] = []

    def has_come() -> bool:
        world.prefill.exchange.turn()
        world.decode.transport.poll_pushes()  # NCCL's receiver has a part in it
        came.extend(world.decode.transport.poll_notifications())
        # A self-test's word may have been on its way.
        chunks = [one for one in came if isinstance(decode(one.payload), Chunk)]
        return bool(world.prefill.of(Sent) and chunks)

    def poll() -> list[Notification]:
        polled = list(came)
        came.clear()
        return polled

    wait_until(has_come)
    monkeypatch.setattr(world.decode.transport, "poll_notifications", poll)


def test_delivery_before_death_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the exchange has not looked yet."""
    transfer = world.sent(48)
    have_come(world, monkeypatch)
    world.decode.exchange.part(world.prefill.name, proven_dead=True)
    world.decode.receiver.abort(transfer.id)
    assert world.decode.of(Delivered)
    assert world.decode.of(ReceiveAborted)[-1].already_ready


@pytest.mark.parametrize("looks", [False, True])
def test_so_does_delivery_whose_grant_is_queued_behind_the_proof(
    loopback: World, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """The grant was told, and written to, while the decode side's thread was busy."""
    transfer = loopback.grant_to_expect(48)
    transfer.begin()
    transfer.finish()
    have_come(loopback, monkeypatch)
    if looks:
        loopback.decode.exchange.look()
    loopback.decode.exchange.part(loopback.prefill.name, proven_dead=True)
    transfer.expect()
    loopback.decode.exchange.work()
    loopback.decode.exchange.turn()
    assert [event.transfer_id for event in loopback.decode.of(Delivered)] == [transfer.id]
    assert loopback.decode.counters.stale_notifications == 0


def test_the_end_of_a_push_is_told_though_it_cannot_be_released() -> None:
    """Else its pages would be pinned for ever."""

    class Agent:
        def __init__(self, agent: object) -> None:
            self._agent = agent

        def __getattr__(self, name: str) -> object:
            return getattr(self._agent, name)

        def releaseXferReq(self, handle: int) -> None:
            raise RuntimeError

    with a_world("nixl") as world:
        transport = world.prefill.transport
        agent, transport._agent = transport._agent, Agent(transport._agent)
        world.sent(48)
        delivered(world)
        assert not world.prefill.exchange.pushes_in_progress

        # Nor does it keep a peer from being forgotten.
        transport.push(world.decode.name, *[np.ones(1, np.int32)] * 2, b"")
        transport.close(world.decode.name)
        wait_until(transport.poll_pushes)
        assert world.decode.name not in transport._peers
        transport._agent = agent


def test_a_grant_to_a_peer_that_is_dead_already(loopback: World) -> None:
    loopback.die(loopback.prefill, at=loopback.decode)
    loopback.die(loopback.decode, at=loopback.prefill)
    transfer = loopback.grant(48)
    loopback.decode.receiver.abort(transfer.id)
    assert loopback.decode.of(ReceiveFreed) == [ReceiveFreed(transfer.id)]
    transfer.begin()
    assert loopback.prefill.of(SendFailed) == [SendFailed(transfer.id, "peer_dead")]
    assert loopback.prefill.of(SendQuiesced) == [SendQuiesced(transfer.id)]
    loopback.prefill.exchange.meet(loopback.decode.transport.endpoint)
    assert loopback.prefill.of(PeerFailed)[-1] == PeerFailed(loopback.decode.name, "peer_dead")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefill_first", [True, False])
def test_peers_meet_in_either_order(kind: str, prefill_first: bool) -> None:
    with a_world(kind, met=False) as world:
        sides = [world.prefill, world.decode]
        first, second = sides if prefill_first else sides[::-1]
        transfer = world.sent(48)
        first.exchange.meet(second.transport.endpoint)
        world.settle()
        second.exchange.meet(first.transport.endpoint)
        first.exchange.meet(second.transport.endpoint)
        delivered(world)
        transfer.assert_delivered()
        world.until(lambda: not world.is_testing)
        opened = world.prefill.of(PeerOpened)[-1]
        assert opened.agent_name == world.decode.name
        assert opened.transport.startswith(kind.split()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_meeting_measures_the_path(kind: str) -> None:
    with a_world(kind, met=False) as world:
        began_s = time.perf_counter()
        world.meet()
        world.until(lambda: world.prefill.of(PeerOpened)[-1].gigabytes_per_s > 0)
        took_s = time.perf_counter() - began_s
        opened = world.prefill.of(PeerOpened)[-1]
        assert 0 < opened.latency_us < 1e6 * took_s
        assert SELF_TEST_BYTES["DRAM"] / took_s / 1e9 < opened.gigabytes_per_s < 1000


def test_a_slow_self_test_delays_nothing_and_its_figures_come_later() -> None:
    with a_world("loopback", met=False) as world:
        world.prefill.loopback.holds = True
        world.prefill.exchange.meet(world.decode.transport.endpoint)
        world.clock.advance(SELF_TEST_S + 0.01)
        world.turn()
        (opened,) = world.prefill.of(PeerOpened)
        assert (opened.gigabytes_per_s, opened.latency_us) == (0, 0)
        world.prefill.loopback.holds = False
        world.until(lambda: len(world.prefill.of(PeerOpened)) == 2)
        assert world.prefill.of(PeerOpened)[-1].gigabytes_per_s > 0


def test_a_path_lost_during_its_self_test_stays_lost_until_it_is_tried_anew() -> None:
    with a_world("loopback", met=False) as world:
        loopback = world.prefill.loopback
        world.prefill.exchange.meet(world.decode.transport.endpoint)
        world.turn(2)  # the first probe is done, the next is posted
        loopback.holds = True
        world.turn()
        world.prefill.exchange.peers.lost(world.decode.name, "push_error")
        loopback.holds = False
        world.turn(8)
        assert not world.prefill.exchange.peers.is_open(world.decode.name)
        assert world.prefill.of(PeerOpened) == []
        world.clock.advance(2.0)
        world.until(lambda: bool(world.prefill.of(PeerOpened)))
        assert world.prefill.exchange.peers.is_open(world.decode.name)


def test_a_send_waits_for_its_peer_and_then_fails() -> None:
    with a_world("loopback", met=False) as world:
        transfer = world.sent(48)
        world.clock.advance(4.0)
        world.turn()
        assert not world.prefill.of(SendFailed)
        world.clock.advance(2.0)
        world.turn()
        assert world.prefill.of(SendFailed) == [SendFailed(transfer.id, "peer_not_open")]
        assert world.prefill.of(SendQuiesced) == [SendQuiesced(transfer.id)]


def test_bad_grants_and_chunks_fail_typed(loopback: World) -> None:
    transfer = loopback.grant(48)
    short = dataclasses.replace(transfer.spec, targets=[Target(transfer.target[:2])])
    loopback.prefill.sender.begin(short)
    assert loopback.prefill.of(SendFailed) == [SendFailed(transfer.id, "bad_grant")]
    outside = loopback.grant(48)
    outside.target[1] = NUM_PAGES
    outside.begin()
    outside.finish()
    loopback.until(lambda: len(loopback.prefill.of(SendFailed)) == 2)
    assert loopback.prefill.of(SendFailed)[1] == SendFailed(outside.id, "bad_pages")
    too_long = loopback.begun(48)
    too_long.compute(49)
    assert loopback.prefill.of(SendFailed)[2] == SendFailed(too_long.id, "bad_chunk")
    too_big = loopback.begun(48)
    too_big.compute(48, b"x" * 5000)
    loopback.until(lambda: len(loopback.prefill.of(SendQuiesced)) == 4)
    assert loopback.prefill.of(SendFailed)[3] == SendFailed(too_big.id, "payload_too_large")
    assert loopback.prefill.counters.transfers_failed == 4


def test_only_the_granting_peer_may_quiesce(world: World) -> None:
    transfer = world.begun(48)
    stale = Quiesce(transfer.id, DECODE_EPOCH + 1)
    world.decode.transport.notify(world.prefill.name, encode(stale))
    with a_world(world.kind, met=False) as other:
        other.decode.exchange.meet(world.prefill.transport.endpoint)
        quiesce = Quiesce(transfer.id, DECODE_EPOCH)
        other.decode.transport.notify(world.prefill.name, encode(quiesce))
        world.until(lambda: world.prefill.counters.stale_notifications == 2)
        if world.kind != "nccl":
            other.until(lambda: not other.decode.exchange.pushes_in_progress)
    transfer.finish()
    delivered(world)


def test_a_mismatched_pool_is_refused(loopback: World) -> None:
    own = loopback.decode.transport.endpoint
    larger = (own.groups[0]._replace(page_bytes=8192),)
    before = ()
    """A worker of the release before tells of no groups."""
    for groups, cause in (
        (larger, "page_size_mismatch"),
        (2 * own.groups, "groups_mismatch"),
        (before, "groups_mismatch"),
    ):
        endpoint = dataclasses.replace(own, agent_name="other", groups=groups)
        loopback.prefill.exchange.meet(endpoint)
        assert loopback.prefill.of(PeerFailed)[-1].cause == cause
    garbage = dataclasses.replace(
        loopback.decode.transport.endpoint, agent_name="other2", metadata=b"garbage"
    )
    loopback.prefill.exchange.meet(garbage)
    assert loopback.prefill.of(PeerFailed)[-1].cause == "unreachable"
