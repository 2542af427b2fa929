"""Pairs of the NCCL transport that come and go while another pair is at work."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from kv_world import NUM_PAGES, Side
from waiting import wait_until

from kv_transfer.types import PushState

HALF = NUM_PAGES // 2
OURS = np.arange(1, HALF, dtype=np.int32)
THEIRS = np.arange(HALF, NUM_PAGES, dtype=np.int32)
WAIT_S = 20.0


class Node(Side):
    """A transport with what it said."""

    def __init__(self) -> None:
        super().__init__("nccl", "node", 1, time.monotonic)
        self.ended: dict[int, PushState] = {}
        self.told: deque[bytes] = deque()

    def poll(self) -> None:
        self.ended |= dict(self.transport.poll_pushes())
        self.told += [notification.payload for notification in self.transport.poll_notifications()]

    def push(self, to: Node, pages: np.ndarray, mark: int) -> int:
        self.pool[torch.from_numpy(pages).long()] = mark
        return self.transport.push(to.name, pages, pages, b"%d" % mark)


class Steady:
    """A pair that pushes again as soon as a push is done, and looks at every page that came."""

    def __init__(self, source: Node, target: Node) -> None:
        meet(source, target)
        self.source, self.target = source, target
        self.rounds = 0
        self._begin()

    def look(self) -> None:
        if (state := self.source.ended.get(self._handle)) is None:
            return
        assert state is PushState.DONE
        came = self.target.pool[torch.from_numpy(OURS).long()]
        assert (came == 1 + self.rounds % 250).all()
        self.rounds += 1
        self._begin()

    def _begin(self) -> None:
        self._handle = self.source.push(self.target, OURS, 1 + self.rounds % 250)


def meet(one: Node, other: Node) -> None:
    one.transport.open(other.transport.endpoint)
    other.transport.open(one.transport.endpoint)


def until(condition: Callable[[], bool], steady: Steady, *guests: Node) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_s, "not in time"
        for node in (steady.source, steady.target, *guests):
            node.poll()
        steady.look()


def test_pairs_form_and_dissolve_while_another_runs() -> None:
    """Guests push to the target and are pushed to; the last one leaves with its push under way."""
    threads = threading.active_count()
    source, hub = Node(), Node()
    steady = Steady(source, hub)
    for mark in (251, 252, 253):
        began = steady.rounds
        guest = Node()
        meet(guest, hub)
        into = guest.push(hub, THEIRS, mark)
        until(lambda: into in guest.ended, steady, guest)
        assert (hub.pool[torch.from_numpy(THEIRS).long()] == mark).all()
        out = hub.push(guest, THEIRS, mark + 1)
        until(lambda: out in hub.ended, steady, guest)
        assert (guest.pool[torch.from_numpy(THEIRS).long()] == mark + 1).all()
        assert guest.ended[into] is hub.ended[out] is PushState.DONE
        assert b"%d" % mark in hub.told
        assert b"%d" % (mark + 1) in guest.told
        until(lambda: steady.rounds > began + 2, steady, guest)
        if mark == 253:
            unended = guest.push(hub, THEIRS, mark)
            guest.transport.close(hub.name)
            guest.poll()
            assert guest.ended[unended] is PushState.ERROR
        hub.transport.close(guest.name)
        guest.transport.shutdown()
    began = steady.rounds
    until(lambda: steady.rounds > began + 2, steady)
    for node in (source, hub):
        node.transport.shutdown()
    wait_until(lambda: threading.active_count() <= threads, show=threading.enumerate)
