"""Two sides of a hand-off, driven turn by turn, over any transport."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
import zmq

from kv_transfer.events import TransferCounters, TransferEvent
from kv_transfer.exchange import Exchange
from kv_transfer.ranks.group import GroupTransport, rank_agent
from kv_transfer.ranks.part import LocalPart, Part
from kv_transfer.ranks.plan import heads_of
from kv_transfer.ranks.remote import RankAgent, RemotePart
from kv_transfer.settling_writes import AFTERMATH_S, LONGEST_TURN_S
from kv_transfer.specs import ReceiveSpec, SendSpec
from kv_transfer.transports.factory import TRANSPORTS, make_transport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.types import KvTransport

RANKED = ("loopback 2-8", "nixl 1-2")
"""Ranks of the prefill and the decode side, each a transport of its own."""
KINDS = sorted({*TRANSPORTS, *RANKED} - {"null"})
"""Every transport that moves pages: the protocol's tests run on each, whatever the factory knows.
One that needs what this machine lacks says so with TransportError `nixl_missing` or the like."""
KV_HEADS = 4
"""Of the pages of `RANKED`: with more ranks, several hold the same head."""
PAGE_BYTES = 4096
NUM_PAGES = 64
PAGE_TOKENS = 16
PREFILL_EPOCH = 7
DECODE_EPOCH = 11

E = TypeVar("E", bound=TransferEvent)
_serial = itertools.count()


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class RankedPool:
    """The pages of several ranks, read and written as whole pages."""

    def __init__(self, count: int, kv_heads: int = KV_HEADS, page_bytes: int = PAGE_BYTES) -> None:
        head_bytes = page_bytes // kv_heads
        self._heads = [heads_of(rank, count, kv_heads) for rank in range(count)]
        self._places = [
            slice(heads.start * head_bytes, heads.stop * head_bytes) for heads in self._heads
        ]
        self._page_bytes = page_bytes
        self.ranks = [
            torch.zeros(NUM_PAGES, len(heads) * head_bytes, dtype=torch.uint8)
            for heads in self._heads
        ]

    def __getitem__(self, pages: torch.Tensor) -> torch.Tensor:
        """Ranks with the same head must have the same bytes of it."""
        whole = torch.zeros(len(pages), self._page_bytes, dtype=torch.uint8)
        for place, pool in zip(self._places, self.ranks, strict=True):
            whole[:, place] = pool[pages]
        for place, pool in zip(self._places, self.ranks, strict=True):
            assert torch.equal(whole[:, place], pool[pages]), "copies of a head differ"
        return whole

    def __setitem__(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        for place, pool in zip(self._places, self.ranks, strict=True):
            pool[pages] = content[:, place]


class Served:
    """Rank 0's end of a rank that a thread of this process serves."""

    _sockets = zmq.Context()

    def __init__(self, kind: str, agent_name: str, pool: torch.Tensor, rank: int) -> None:
        ours, theirs = (self._sockets.socket(zmq.PAIR) for _ in range(2))
        ours.bind(f"inproc://{agent_name}")
        theirs.connect(f"inproc://{agent_name}")

        def make(name: str, agent: str) -> KvTransport:
            return make_transport(name, agent, pool, pool.shape[1], NUM_PAGES)

        agent = RankAgent(theirs, rank, make)
        threading.Thread(target=agent.serve, daemon=True).start()
        self.part = RemotePart(ours, kind, agent_name, lambda: "").built()


def ranked_transport(kind: str, name: str, pool: RankedPool, kv_heads: int) -> GroupTransport:
    """Loopback's ranks are here, where a test can hold their pushes; others are served."""
    parts: list[Part] = []
    for rank, part in enumerate(pool.ranks):
        agent = rank_agent(name, rank)
        if rank == 0 or kind == "loopback":
            own = make_transport(kind, agent, part, part.shape[1], NUM_PAGES)
            parts.append(LocalPart(own))
        else:
            parts.append(Served(kind, agent, part, rank).part)
    return GroupTransport(parts, kv_heads)


class Side:
    """One process's worth of hand-off."""

    pool: torch.Tensor | RankedPool
    transport: KvTransport

    def __init__(
        self,
        kind: str,
        role: str,
        epoch: int,
        clock: Callable[[], float],
        kv_heads: int = KV_HEADS,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self.name = f"{role}-{os.getpid()}-{next(_serial)}"
        kind, _, ranks = kind.partition(" ")
        if ranks:
            counts = dict(zip(("prefill", "decode"), map(int, ranks.split("-")), strict=True))
            self.pool = RankedPool(counts[role], kv_heads, page_bytes)
            self.transport = ranked_transport(kind, self.name, self.pool, kv_heads)
        else:
            self.pool = torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8)
            self.transport = make_transport(kind, self.name, self.pool, PAGE_BYTES, NUM_PAGES)
        self.events: list[TransferEvent] = []
        self.counters = TransferCounters()
        self.exchange = Exchange(self.transport, epoch, self.events.append, self.counters, clock)
        self.sender = self.exchange.sender
        self.receiver = self.exchange.receiver

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def loopback(self) -> LoopbackTransport:
        assert isinstance(self.transport, LoopbackTransport)
        return self.transport


class World:
    """A prefill side and a decode side."""

    def __init__(
        self,
        kind: str,
        met: bool = True,
        seed: int = 1,
        kv_heads: int = KV_HEADS,
        page_bytes: int = PAGE_BYTES,
    ) -> None:
        self.kind = kind
        self.page_bytes = page_bytes
        self.clock = FakeClock()
        pages = kv_heads, page_bytes
        self.prefill = Side(kind, "prefill", PREFILL_EPOCH, self.clock, *pages)
        self.decode = Side(kind, "decode", DECODE_EPOCH, self.clock, *pages)
        self.rng = np.random.default_rng(seed)
        if met:
            self.meet()

    def meet(self) -> None:
        self.prefill.exchange.meet(self.decode.transport.endpoint)
        self.decode.exchange.meet(self.prefill.transport.endpoint)
        self.until(lambda: not self.is_testing)

    @property
    def is_testing(self) -> bool:
        return any(side.exchange.peers.any_testing for side in (self.prefill, self.decode))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.prefill.exchange.turn()
            self.decode.exchange.turn()
            self.prefill.exchange.check_invariants()
            self.decode.exchange.check_invariants()

    def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        ends_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < ends_s, "condition not met in time"
            self.turn()

    def settle(self) -> None:
        """Turns for as long as what was sent takes to arrive, as a rule: for what must not come of
        it. What must is waited for by `until`."""
        if self.kind.startswith("loopback"):
            self.turn(4)
            return
        ends_s = time.monotonic() + 0.1
        while time.monotonic() < ends_s:
            self.turn()

    def die(self, peer: Side, at: Side) -> None:
        """The process of `peer` is proven gone at the other side, and the aftermath is over."""
        at.exchange.part(peer.name, proven_dead=True)
        for _ in range(2 + round(AFTERMATH_S / LONGEST_TURN_S)):
            self.clock.advance(LONGEST_TURN_S)
            at.exchange.turn()

    def grant(
        self, num_tokens: int, held_pages: int = 0, timeout_s: float = 60.0, merged: bool = False
    ) -> Transfer:
        transfer = self.grant_to_expect(num_tokens, held_pages, timeout_s, merged)
        transfer.expect()
        return transfer

    def grant_to_expect(
        self, num_tokens: int, held_pages: int = 0, timeout_s: float = 60.0, merged: bool = False
    ) -> Transfer:
        """One whose `expect` is still in the decode side's queue, though it was told already."""
        return Transfer(self, num_tokens, held_pages, timeout_s, merged)

    def close(self) -> None:
        self.prefill.transport.shutdown()
        self.decode.transport.shutdown()


class Transfer:
    """A grant with its bytes: the source pages are filled."""

    def __init__(
        self, world: World, num_tokens: int, held_pages: int, timeout_s: float, merged: bool
    ) -> None:
        rng = world.rng
        num_pages = -(-num_tokens // PAGE_TOKENS)
        self.world = world
        self.id = rng.bytes(16)
        self.source = self._pages(rng, num_pages, merged)
        self.target = self._pages(rng, num_pages, merged)
        content = rng.integers(1, 255, (num_pages, world.page_bytes), dtype=np.uint8)
        world.prefill.pool[torch.from_numpy(self.source).long()] = torch.from_numpy(content)
        self.content = content
        self.num_tokens = num_tokens
        self.held_pages = held_pages
        self._timeout_s = timeout_s

    @property
    def receive_spec(self) -> ReceiveSpec:
        peer, num_pages = self.world.prefill.name, len(self.target)
        return ReceiveSpec(
            self.id, peer, num_pages, self.held_pages, self.num_tokens, self._timeout_s
        )

    def expect(self) -> None:
        self.world.decode.receiver.expect(self.receive_spec)

    @staticmethod
    def _pages(rng: np.random.Generator, num_pages: int, merged: bool) -> np.ndarray:
        pages = np.arange(1, NUM_PAGES) if merged else rng.permutation(NUM_PAGES - 1) + 1
        return pages[:num_pages].astype(np.int32)

    @property
    def spec(self) -> SendSpec:
        return SendSpec(
            self.id,
            self.world.decode.name,
            DECODE_EPOCH,
            self.source,
            self.target,
            self.held_pages,
            self.num_tokens,
            PAGE_TOKENS,
            b"spanspan",
        )

    def begin(self) -> None:
        self.world.prefill.sender.begin(self.spec)

    def compute(self, end_token: int | None = None, payload: bytes | None = None) -> None:
        end_token = self.num_tokens if end_token is None else end_token
        self.world.prefill.sender.chunk_computed(self.id, end_token, payload)

    def finish(self) -> None:
        self.compute(self.num_tokens, b"first tokens")

    def received(self) -> np.ndarray:
        return self.world.decode.pool[torch.from_numpy(self.target).long()].numpy()

    def assert_delivered(self) -> None:
        assert (self.received()[self.held_pages :] == self.content[self.held_pages :]).all()
        assert not self.received()[: self.held_pages].any()


@contextmanager
def a_world(kind: str, met: bool = True, seed: int = 1, **pages: int) -> Iterator[World]:
    """`pages` are KV heads and bytes of a page, where the sides have ranks."""
    world = World(kind, met, seed, **pages)
    try:
        yield world
    finally:
        world.close()
