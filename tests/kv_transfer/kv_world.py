"""Two sides of a hand-off, driven turn by turn, over any transport."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import zmq

from kv_transfer.events import TransferCounters, TransferEvent
from kv_transfer.exchange import Exchange
from kv_transfer.ranks.group import GroupTransport, rank_agent
from kv_transfer.ranks.part import LocalPart, Part
from kv_transfer.ranks.plan import units_of
from kv_transfer.ranks.remote import RankAgent, RemotePart
from kv_transfer.settling_writes import LONGEST_TURN_S, SETTLING_S
from kv_transfer.specs import Range, ReceiveSpec, SendSpec, Source, Target
from kv_transfer.transports.factory import TRANSPORTS, make_transport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import KvTransport, PageGroup, PageIds

RANKED = ("loopback 2-8", "nixl 1-2")
"""Ranks of the prefill and the decode side, each a transport of its own. `2@1 3`: two ranks of each
of two stages, whose layers end there. `2@3/1 3`: two ranks, of all three layers in two bands."""
KINDS = sorted({*TRANSPORTS, *RANKED})
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


def laid_out(*groups: PageGroup) -> tuple[PageGroup, ...]:
    """Groups one behind the other, with a gap between them."""
    placed, at = list[PageGroup](), 0
    for group in groups:
        placed.append(group._replace(offset=at))
        at = placed[-1].end + 64
    return tuple(placed)


ONE = laid_out(PageGroup(PAGE_BYTES, NUM_PAGES, KV_HEADS))
THREE = laid_out(ONE[0], PageGroup(1536, 48, 2), PageGroup(8192, 40, 1))
"""All tokens, a window (`WINDOW_PAGES`), and one page of state."""
WINDOW_PAGES = 3


def held_bytes(group: PageGroup, units: range, bands: Sequence[range]) -> torch.Tensor:
    """Which bytes of a whole page a rank has, in the order in which it has them."""
    size = group.page_bytes // group.units
    planes = group.planes or (size,)
    starts = [sum(planes[:at]) * (group.num_layers or 1) for at in range(len(planes))]
    runs = [
        torch.arange(unit * size + start + one.start, unit * size + start + one.stop)
        for layers, unit in itertools.product(bands, units)
        for start, plane in zip(starts, planes, strict=True)
        for one in [range(layers.start * plane, layers.stop * plane)]
    ]
    return torch.cat(runs)


class RankedPool:
    """The pages of one or several ranks, read and written as whole pages."""

    def __init__(
        self,
        count: int = 1,
        groups: Sequence[PageGroup] = ONE,
        ends: Sequence[int] = (),
        band_ends: Sequence[int] = (),
    ) -> None:
        """`ends`: where the layers of each stage end, the first one first; empty: one stage. Each
        has `count` ranks. `band_ends`: where those of each band end, likewise."""
        self.groups = groups
        self.units = [group.units for group in groups]
        self.stages = max(1, len(ends))
        layers = [range(*span) for span in itertools.pairwise([0, *ends])][::-1]
        self._places: list[list[torch.Tensor]] = [[] for _ in groups]
        self.parts: list[tuple[PageGroup, ...]] = []
        """By rank, of its tensor in `ranks`."""
        for rank in range(count * self.stages):
            part = []
            for places, group in zip(self._places, groups, strict=True):
                own = layers[rank // count] if layers else range(group.num_layers or 1)
                units = units_of(rank % count, count, group.units)
                cuts = [own.start, *(end for end in band_ends if end in own[1:]), own.stop]
                bands = [range(*span) for span in itertools.pairwise(cuts)]
                places.append(held_bytes(group, units, bands))
                counts = tuple(map(len, bands)) if len(bands) > 1 else ()
                told = {"first_layer": own.start, "num_layers": len(own), "bands": counts}
                told = told if group.planes else {}
                part.append(group._replace(page_bytes=len(places[-1]), **told))
            self.parts.append(laid_out(*part))
        self.ranks = [torch.zeros(part[-1].end, dtype=torch.uint8) for part in self.parts]

    def read(self, group: int, pages: torch.Tensor) -> torch.Tensor:
        """Ranks with the same unit must have the same bytes of it."""
        whole = torch.zeros(len(pages), self.groups[group].page_bytes, dtype=torch.uint8)
        for rank, place in enumerate(self._places[group]):
            whole[:, place] = self._of(rank, group)[pages]
        for rank, place in enumerate(self._places[group][1:], 1):
            assert torch.equal(whole[:, place], self._of(rank, group)[pages]), "copies differ"
        return whole

    def write(self, group: int, pages: torch.Tensor, content: torch.Tensor) -> None:
        for rank, place in enumerate(self._places[group]):
            self._of(rank, group)[pages] = content[:, place]

    def _of(self, rank: int, group: int) -> torch.Tensor:
        return PoolMemory.of(self.ranks[rank], self.parts[rank]).pages(group)

    def __getitem__(self, pages: torch.Tensor) -> torch.Tensor:
        return self.read(0, pages)

    def __setitem__(self, pages: torch.Tensor, content: torch.Tensor | int) -> None:
        whole = (len(pages), self.groups[0].page_bytes)
        self.write(0, pages, torch.as_tensor(content, dtype=torch.uint8).expand(whole))


class Served:
    """Rank 0's end of a rank that a thread of this process serves."""

    _sockets = zmq.Context()

    def __init__(self, kind: str, agent_name: str, pool: RankedPool, rank: int) -> None:
        ours, theirs = (self._sockets.socket(zmq.PAIR) for _ in range(2))
        ours.bind(f"inproc://{agent_name}")
        theirs.connect(f"inproc://{agent_name}")

        def make(name: str, agent: str) -> KvTransport:
            return make_transport(name, agent, pool.ranks[rank], pool.parts[rank])

        agent = RankAgent(theirs, rank, make)
        threading.Thread(target=agent.serve, daemon=True).start()
        self.part = RemotePart(ours, kind, agent_name, lambda: "").built()


def ranked_transport(kind: str, name: str, pool: RankedPool) -> GroupTransport:
    """Loopback's ranks are here, where a test can hold their pushes; others are served."""
    parts: list[Part] = []
    for rank, part in enumerate(pool.ranks):
        agent = rank_agent(name, rank)
        if rank == 0 or kind == "loopback":
            own = make_transport(kind, agent, part, pool.parts[rank])
            parts.append(LocalPart(own))
        else:
            parts.append(Served(kind, agent, pool, rank).part)
    return GroupTransport(parts, pool.units, pool.stages)


class Side:
    """One process's worth of hand-off."""

    transport: KvTransport

    def __init__(
        self,
        kind: str,
        role: str,
        epoch: int,
        clock: Callable[[], float],
        groups: Sequence[PageGroup] = ONE,
    ) -> None:
        self.name = f"{role}-{os.getpid()}-{next(_serial)}"
        kind, _, ranks = kind.partition(" ")
        if ranks:
            own = dict(zip(("prefill", "decode"), ranks.split("-"), strict=True))[role]
            count, _, layers = own.partition("@")
            ends, bands = ([*map(int, each.split())] for each in f"{layers}/".split("/")[:2])
            self.pool = RankedPool(int(count), groups, ends, bands)
            self.transport = ranked_transport(kind, self.name, self.pool)
        else:
            self.pool = RankedPool(1, groups)
            memory = self.pool.ranks[0], self.pool.parts[0]
            self.transport = make_transport(kind, self.name, *memory)
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
        groups: Sequence[PageGroup] = ONE,
    ) -> None:
        self.kind = kind
        self.groups = groups
        self.clock = FakeClock()
        self.prefill = Side(kind, "prefill", PREFILL_EPOCH, self.clock, groups)
        self.decode = Side(kind, "decode", DECODE_EPOCH, self.clock, groups)
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
        for _ in range(2 + round(SETTLING_S / LONGEST_TURN_S)):
            self.clock.advance(LONGEST_TURN_S)
            at.exchange.turn()

    def grant(
        self, num_tokens: int, held_pages: int = 0, timeout_s: float = 60.0, merged: bool = False
    ) -> Transfer:
        transfer = self.grant_to_expect(num_tokens, held_pages, timeout_s, merged)
        transfer.expect()
        return transfer

    def begun(self, *arguments: Any, **options: Any) -> Transfer:
        """A grant that the prefill side has."""
        transfer = self.grant(*arguments, **options)
        transfer.begin()
        return transfer

    def sent(self, *arguments: Any, **options: Any) -> Transfer:
        """A grant whose whole prompt is computed at once."""
        transfer = self.begun(*arguments, **options)
        transfer.finish()
        return transfer

    def grant_to_expect(
        self, num_tokens: int, held_pages: int = 0, timeout_s: float = 60.0, merged: bool = False
    ) -> Transfer:
        """One whose `expect` is still in the decode side's queue, though it was told already."""
        return Transfer(self, num_tokens, held_pages, timeout_s, merged)

    def close(self) -> None:
        self.prefill.transport.shutdown()
        self.decode.transport.shutdown()


def targets_of(
    num_pages: int,
    held_pages: int,
    groups: Sequence[PageGroup],
    pages: Callable[[int, int], PageIds],
) -> list[Target]:
    """What is granted of each of `THREE` groups, or of the first of them; `pages` draws so many of
    a group."""
    first = max(0, num_pages - WINDOW_PAGES)
    counts = [num_pages, num_pages - first, 1]
    drawn = [pages(group, counts[group]) for group in range(len(groups))]
    # Of the window and the state as much is held as of a prompt that was here before.
    held = [held_pages, max(0, held_pages - first), int(held_pages == num_pages)]
    return [
        Target(drawn[group], held[group], first if group == 1 else 0, group == 2)
        for group in range(len(groups))
    ]


def ranges_of(targets: Sequence[Target]) -> tuple[Range, ...]:
    return tuple(Range(target.begin, target.end) for target in targets)


class Transfer:
    """A grant with its bytes: the source pages are filled."""

    def __init__(
        self, world: World, num_tokens: int, held_pages: int, timeout_s: float, merged: bool
    ) -> None:
        rng = world.rng
        num_pages = -(-num_tokens // PAGE_TOKENS)
        self.world = world
        self.id = rng.bytes(16)

        def pages(group: int, count: int) -> np.ndarray:
            most = world.groups[group].num_pages
            drawn = np.arange(1, most) if merged else rng.permutation(most - 1) + 1
            return drawn[:count].astype(np.int32)

        self.targets = targets_of(num_pages, held_pages, world.groups, pages)
        self.sources = [
            Source(pages(group, len(target.pages)), target.first_page)
            for group, target in enumerate(self.targets)
        ]
        self.contents = [self._filled(group) for group in range(len(self.targets))]
        self.source, self.target = self.sources[0].pages, self.targets[0].pages
        self.content = self.contents[0]
        self.num_tokens = num_tokens
        self.held_pages = held_pages
        self._timeout_s = timeout_s

    def _filled(self, group: int) -> np.ndarray:
        pages, page_bytes = self.sources[group].pages, self.world.groups[group].page_bytes
        content = self.world.rng.integers(1, 255, (len(pages), page_bytes), dtype=np.uint8)
        rows = torch.from_numpy(pages).long()
        self.world.prefill.pool.write(group, rows, torch.from_numpy(content))
        return content

    @property
    def receive_spec(self) -> ReceiveSpec:
        peer, ranges = self.world.prefill.name, ranges_of(self.targets)
        return ReceiveSpec(self.id, peer, ranges, self.num_tokens, self._timeout_s)

    def expect(self) -> None:
        self.world.decode.receiver.expect(self.receive_spec)

    @property
    def spec(self) -> SendSpec:
        return SendSpec(
            self.id,
            self.world.decode.name,
            DECODE_EPOCH,
            self.targets,
            self.num_tokens,
            PAGE_TOKENS,
            b"spanspan",
        )

    def begin(self) -> None:
        self.world.prefill.sender.begin(self.spec)

    def compute(self, end_token: int | None = None, payload: bytes | None = None) -> None:
        end_token = self.num_tokens if end_token is None else end_token
        self.world.prefill.sender.chunk_computed(self.id, end_token, payload, self.sources)

    def finish(self) -> None:
        self.compute(self.num_tokens, b"first tokens")

    def received(self, group: int = 0) -> np.ndarray:
        pages = torch.from_numpy(self.targets[group].pages).long()
        return self.world.decode.pool.read(group, pages).numpy()

    def assert_delivered(self) -> None:
        for group, target in enumerate(self.targets):
            held, received = target.held_pages, self.received(group)
            assert (received[held:] == self.contents[group][held:]).all()
            assert not received[:held].any()


@contextmanager
def a_world(
    kind: str, met: bool = True, seed: int = 1, groups: Sequence[PageGroup] = ONE
) -> Iterator[World]:
    world = World(kind, met, seed, groups)
    try:
        yield world
    finally:
        world.close()
