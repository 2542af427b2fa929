"""A grant is queued, told and written to, and something else happens, at every point of the decode
side's turns: what was delivered is READY, whatever came first.

The turns are those of `TransferThread`, taken one by one on this thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations_with_replacement

import pytest
from kv_world import DECODE_EPOCH, Transfer, World, a_world

from kv_transfer.events import Delivered, ReceiveAborted, ReceiveFreed
from kv_transfer.thread import TransferThread

Happens = Callable[[], None]
POINTS = range(6)
"""Of a turn and a half: before its first command, before and after the look, before the work."""


class Turns:
    """The decode side's thread, without being one. `happens` says what happens at which point."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.exchange = exchange = world.decode.exchange
        self.happens: dict[int, list[Happens]] = {}
        self.thread = TransferThread(lambda: world.decode.transport, DECODE_EPOCH, lambda _: None)
        self._point = 0
        self._exchange_looks, self._exchange_works = exchange.look, exchange.work
        exchange.look, exchange.work = self._look, self._work
        exchange.pause_s = lambda: 0.0

    def at(self, point: int, happens: Happens) -> None:
        self.happens.setdefault(point, []).append(happens)

    def take(self) -> None:
        """As many turns as have points, and those that it takes until all was read."""
        self._point = 0
        for _ in range(5):
            self._reach()
            self.thread._turn(self.exchange)
            self.exchange.check_invariants()
        self.happens.clear()

    def _look(self) -> None:
        self._reach()
        self._exchange_looks()
        self._reach()

    def _work(self) -> None:
        self._reach()
        self._exchange_works()

    def _reach(self) -> None:
        for happens in self.happens.get(self._point, ()):
            happens()
        self._point += 1


def granted(turns: Turns) -> tuple[Transfer, Happens, Happens]:
    """A transfer to come: what queues its grant, and what fills it whole."""
    transfer = turns.world.grant_to_expect(48)

    def is_written() -> None:
        transfer.begin()
        transfer.finish()
        turns.world.prefill.exchange.turn()

    return transfer, lambda: turns.thread.expect(transfer.receive_spec), is_written


def delivered(world: World) -> list[bytes]:
    return [event.transfer_id for event in world.decode.of(Delivered)]


def test_an_answer_about_another_transfer(loopback: World) -> None:
    turns = Turns(loopback)
    for expected_at, written_at in combinations_with_replacement(POINTS, 2):
        for answered_at in POINTS:
            given_up = loopback.grant(48)
            loopback.decode.receiver.abort(given_up.id)
            transfer, is_granted, is_written = granted(turns)
            turns.at(expected_at, is_granted)
            turns.at(written_at, is_written)
            answer = (given_up.id, loopback.prefill.name, DECODE_EPOCH)
            turns.at(answered_at, partial(turns.thread.quiesced, *answer))
            turns.take()
            assert delivered(loopback)[-1] == transfer.id, (expected_at, written_at, answered_at)
            assert ReceiveFreed(given_up.id) in loopback.decode.events
    assert loopback.decode.counters.stale_notifications == 0


@pytest.mark.parametrize("by_kernel", [True, False])
def test_the_writers_death(by_kernel: bool) -> None:
    for expected_at, written_at, dead_at in combinations_with_replacement(POINTS, 3):
        with a_world("loopback") as world:
            turns = Turns(world)
            transfer, is_granted, is_written = granted(turns)
            turns.at(expected_at, is_granted)
            turns.at(written_at, is_written)
            turns.at(dead_at, partial(die, turns, by_kernel=by_kernel))
            turns.take()
            assert delivered(world) == [transfer.id], (expected_at, written_at, dead_at)
            world.decode.receiver.abort(transfer.id)
            assert world.decode.of(ReceiveAborted)[-1].already_ready
            assert world.decode.counters.stale_notifications == 0


def die(turns: Turns, *, by_kernel: bool) -> None:
    """Proven by the kernel, or by a router's word."""
    name = turns.world.prefill.name
    if by_kernel:
        gone = [name]
        turns.exchange._processes.gone = lambda: [gone.pop()] if gone else []
    else:
        turns.thread.part(name, True)
