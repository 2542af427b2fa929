"""Both state machines under every order of events, against a model that sees every write.

Two prefill sides and a decode side over a network that lands pushes in any order, at any time or
never, shows notifications in any order and more than once, and loses questions. The model knows
each write that can still land, which no side does, and checks what each side claims.

Each side may have several ranks. Then each part of a push lands by itself. The pool has one to
three groups of pages.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from kv_world import PAGE_TOKENS, THREE, FakeClock, RankedPool, ranges_of, targets_of

from kv_transfer.events import (
    Delivered,
    ReceiveAborted,
    ReceiveExpired,
    ReceiveFreed,
    SendQuiesced,
    TransferCounters,
    TransferEvent,
)
from kv_transfer.exchange import Exchange
from kv_transfer.ranks.group import _HEADER, _MAGIC, GroupTransport, rank_agent
from kv_transfer.ranks.part import LocalPart
from kv_transfer.receiving import ReceiveState
from kv_transfer.settling_writes import LONGEST_TURN_S, SETTLING_S
from kv_transfer.specs import ReceiveSpec, SendSpec, Source
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import Notification, PageGroup, PageIds, PushState
from kv_transfer.wire import Chunk, MalformedNotification, Message, Quiesce, Quiesced, decode

EPOCH = 3
LATE_S = 0.5
"""What a dead process had posted still lands within this time."""
_serial = itertools.count()


class ChaosTransport(LoopbackTransport):
    """Loopback whose pushes end, and whose notifications appear, when chance says so."""

    def __init__(self, name: str, pool: RankedPool, rank: int, rng: random.Random) -> None:
        super().__init__(name, PoolMemory.of(pool.ranks[rank], pool.parts[rank]))
        self.holds = True
        self.rng = rng
        self.in_flight: list[Notification] = []
        self.transfer_of: dict[int, bytes] = {}
        self.on_post: Callable[[bytes], None] = lambda transfer_id: None
        self.on_land: Callable[[bytes], None] = lambda transfer_id: None

    def push(
        self, agent_name: str, source: PageIds, target: PageIds, payload: bytes, group: int = 0
    ) -> int:
        handle = super().push(agent_name, source, target, payload, group)
        match self.message_of(payload):
            case Chunk(transfer_id):
                self.transfer_of[handle] = transfer_id
                self.on_post(transfer_id)
            case _:
                self.land(handle)
        return handle

    def message_of(self, payload: bytes) -> Message:
        return decode(payload)

    def land(self, handle: int) -> None:
        super().land(handle)
        if handle in self.transfer_of:
            self.on_land(self.transfer_of[handle])

    def poll_notifications(self) -> list[Notification]:
        self.in_flight += super().poll_notifications()
        self.rng.shuffle(self.in_flight)
        shown = self.in_flight[: self.rng.randint(0, 3)]
        kept = [one for one in shown if self.rng.random() < 0.1]
        self.in_flight = self.in_flight[len(shown) :] + kept
        return [one for one in shown if not self._is_lost(one)]

    def _is_lost(self, notification: Notification) -> bool:
        try:
            is_question = isinstance(decode(notification.payload), Quiesce | Quiesced)
        except MalformedNotification:
            return False
        return is_question and self.rng.random() < 0.3


class ChaosRank(ChaosTransport):
    """One of several ranks. The first part of a push alone says what the push carries."""

    def __init__(
        self,
        name: str,
        pool: RankedPool,
        rank: int,
        rng: random.Random,
        carried: dict[bytes, Message],
    ) -> None:
        super().__init__(name, pool, rank, rng)
        self.carried = carried

    def message_of(self, payload: bytes) -> Message:
        if not payload.startswith(_MAGIC):
            return decode(payload)
        header, said = payload[: _HEADER.size], payload[_HEADER.size :]
        if said:
            self.carried[header] = decode(said)
        return self.carried[header]


class ChaosGroup(GroupTransport):
    """Several ranks, each with a chance of its own."""

    def __init__(self, name: str, pool: RankedPool, rng: random.Random) -> None:
        carried: dict[bytes, Message] = {}
        self.ranks = [
            ChaosRank(rank_agent(name, rank), pool, rank, rng, carried)
            for rank in range(len(pool.ranks))
        ]
        super().__init__([LocalPart(rank) for rank in self.ranks], pool.units)


class Party:
    def __init__(
        self, role: str, epoch: int, rng: random.Random, clock: FakeClock, ranks: Ranks
    ) -> None:
        name = f"{role}-{next(_serial)}"
        self.ranks: list[ChaosTransport]
        self.transport: ChaosTransport | ChaosGroup
        if ranks.units:
            self.pool = RankedPool(ranks.of(role, rng), ranks.groups)
            self.transport = ChaosGroup(name, self.pool, rng)
            self.ranks = list(self.transport.ranks)
        else:
            self.pool = RankedPool(1, ranks.groups)
            self.transport = ChaosTransport(name, self.pool, 0, rng)
            self.ranks = [self.transport]
        self.events: list[TransferEvent] = []
        self.counters = TransferCounters()
        self.exchange = Exchange(self.transport, epoch, self.events.append, self.counters, clock)
        self.name = self.transport.endpoint.agent_name

    @property
    def held(self) -> list[tuple[ChaosTransport, int]]:
        """Parts that have not landed."""
        return [(rank, handle) for rank in self.ranks for handle in rank.held_pushes]


class Ranks(NamedTuple):
    """Numbers of ranks that a prefill side may have, that of the decode side, and units of a page
    of each group. Without units, no side is a group of ranks."""

    prefill: tuple[int, ...] = (1,)
    decode: int = 1
    units: tuple[int, ...] = ()
    count: int = 1
    """Groups of pages, where there are no units."""

    @property
    def groups(self) -> tuple[PageGroup, ...]:
        units = self.units or (1,) * self.count
        return tuple(
            group._replace(units=count) for group, count in zip(THREE, units, strict=False)
        )

    def of(self, role: str, rng: random.Random) -> int:
        return self.decode if role == "decode" else rng.choice(self.prefill)


class Model:
    """What is true, from outside."""

    def __init__(self, seed: int, ranks: Ranks) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.ranks = ranks
        self.decode = Party("decode", EPOCH, self.rng, self.clock, ranks)
        self.prefills = [Party("prefill", 1, self.rng, self.clock, ranks) for _ in range(2)]
        self.party_of: dict[bytes, Party] = {}
        self.specs: dict[bytes, SendSpec] = {}
        self.sources: dict[bytes, list[Source]] = {}
        self.contents: dict[bytes, list[np.ndarray]] = {}
        self.computed: dict[bytes, int] = {}
        self.can_land: dict[bytes, int] = defaultdict(int)
        self.dead: dict[Party, tuple[float, list[bytes]]] = {}
        """Until when what they had posted may land, and of which transfers."""
        self.quiesced: set[bytes] = set()
        self.ready: set[bytes] = set()
        self.freed: set[bytes] = set()
        self.free_pages = [list(range(1, group.num_pages)) for group in ranks.groups]
        for party in self.prefills:
            self._watch(party)
        self.meet()

    def _watch(self, party: Party) -> None:
        for rank in party.ranks:
            rank.on_post = self.posted
            rank.on_land = self.landed

    def landed(self, transfer_id: bytes) -> None:
        assert transfer_id not in self.ready | self.freed, "a write into somebody else's pages"
        self.can_land[transfer_id] -= 1

    def posted(self, transfer_id: bytes) -> None:
        assert transfer_id not in self.quiesced, "posted after QUIESCED"
        assert transfer_id not in self.freed, "posted into free pages"
        assert transfer_id not in self.ready, "posted after READY"
        self.can_land[transfer_id] += 1

    def observe(self) -> None:
        for event in self._drain(self.decode):
            match event:
                case Delivered(transfer_id):
                    self._check_ready(transfer_id)
                case ReceiveFreed(transfer_id):
                    self._check_freed(transfer_id)
                case ReceiveAborted(transfer_id, already_ready):
                    assert already_ready is (transfer_id in self.ready)
                case ReceiveExpired(transfer_id):
                    assert transfer_id not in self.ready | self.freed
        for party in self.prefills:
            for event in self._drain(party):
                if isinstance(event, SendQuiesced):
                    assert not self.can_land[event.transfer_id], "quiesced with a write under way"
                    self.quiesced.add(event.transfer_id)
        for party in (self.decode, *self.prefills):
            party.exchange.check_invariants()

    @staticmethod
    def _drain(party: Party) -> list[TransferEvent]:
        events = list(party.events)
        party.events.clear()
        return events

    def _check_ready(self, transfer_id: bytes) -> None:
        assert transfer_id not in self.ready | self.freed
        assert not self.can_land[transfer_id], "READY with a write under way"
        spec = self.specs[transfer_id]
        for group, target in enumerate(spec.targets):
            held, content = target.held_pages, self.contents[transfer_id][group]
            pages = torch.from_numpy(target.pages[held:]).long()
            received = self.decode.pool.read(group, pages).numpy()
            assert (received == content[held:]).all(), "foreign KV"
        self.ready.add(transfer_id)
        self._give_back(transfer_id)

    def _check_freed(self, transfer_id: bytes) -> None:
        assert transfer_id not in self.ready | self.freed
        assert not self.can_land[transfer_id], "freed with a write under way"
        self.freed.add(transfer_id)
        self._give_back(transfer_id)

    def _give_back(self, transfer_id: bytes) -> None:
        for free, target in zip(self.free_pages, self.specs[transfer_id].targets, strict=True):
            free += target.pages.tolist()

    def grant(self) -> None:
        party = self.rng.choice(self.prefills)
        num_tokens = self.rng.randint(1, 8 * PAGE_TOKENS)
        num_pages = -(-num_tokens // PAGE_TOKENS)
        if any(num_pages > len(free) for free in self.free_pages):
            return
        transfer_id = self.rng.randbytes(16)
        held = self.rng.choice([0, 0, self.rng.randint(0, num_pages)])
        targets = targets_of(num_pages, held, self.ranks.groups, self._take)
        self.sources[transfer_id] = [
            Source(self._draw(group, len(target.pages)), target.first_page)
            for group, target in enumerate(targets)
        ]
        self.party_of[transfer_id] = party
        self.specs[transfer_id] = SendSpec(
            transfer_id, self.decode.name, EPOCH, targets, num_tokens, PAGE_TOKENS
        )
        self.computed[transfer_id] = 0
        timeout_s = self.rng.choice([0.5, 100.0, 100.0])
        self.decode.exchange.receiver.expect(
            ReceiveSpec(transfer_id, party.name, ranges_of(targets), num_tokens, timeout_s)
        )

    def _take(self, group: int, count: int) -> PageIds:
        free = self.free_pages[group]
        self.rng.shuffle(free)
        return np.array([free.pop() for _ in range(count)], dtype=np.int32)

    def _draw(self, group: int, count: int) -> PageIds:
        pages = range(1, self.ranks.groups[group].num_pages)
        return np.array(self.rng.sample(pages, count), dtype=np.int32)

    def begin(self) -> None:
        transfer_id = self._any()
        self.party_of[transfer_id].exchange.sender.begin(self.specs[transfer_id])

    def compute(self) -> None:
        """Source pages are one transfer's until the model sees it quiesced: here, written once."""
        transfer_id = self._any()
        spec, party = self.specs[transfer_id], self.party_of[transfer_id]
        if transfer_id not in self.contents:
            self.contents[transfer_id] = [
                self._filled(group, source.pages, party)
                for group, source in enumerate(self.sources[transfer_id])
            ]
        done = self.computed[transfer_id] = min(
            spec.num_tokens, self.computed[transfer_id] + self.rng.randint(1, 60)
        )
        payload = b"tokens" if done == spec.num_tokens and self.rng.random() < 0.8 else None
        sources = self._known_by(transfer_id, done)
        party.exchange.sender.chunk_computed(transfer_id, done, payload, sources)

    def _known_by(self, transfer_id: bytes, end_token: int) -> list[Source]:
        """Pages behind a window are there when their chunk is computed, and not before."""
        first, *others = self.sources[transfer_id]
        known = [first]
        for source in others:
            count = max(0, -(-end_token // PAGE_TOKENS) - source.first_page)
            known.append(source._replace(pages=source.pages[:count]))
        return known

    def _filled(self, group: int, source: PageIds, party: Party) -> np.ndarray:
        """Each page holds the same bytes always, so transfers may share source pages."""
        stamp = source.astype(np.uint8)[:, None] + 64 * self.prefills.index(party) + 85 * group
        content = np.broadcast_to(stamp, (len(source), self.ranks.groups[group].page_bytes)).copy()
        party.pool.write(group, torch.from_numpy(source).long(), torch.from_numpy(content))
        return content

    def abort_send(self) -> None:
        transfer_id = self._any()
        self.party_of[transfer_id].exchange.sender.abort(transfer_id)

    def abort_receive(self) -> None:
        self.decode.exchange.receiver.abort(self._any())

    def land(self) -> None:
        party = self.rng.choice([*self.prefills, *self.dead])
        if party.held:
            rank, handle = self.rng.choice(party.held)
            rank.land(handle)

    def error(self) -> None:
        """A write that landed all the same, or that may land for as long as its process lives."""
        party = self.rng.choice(self.prefills)
        if party.held:
            rank, handle = self.rng.choice(party.held)
            lands = self.rng.random() < 0.5
            rank.fail(handle, lands)
            if lands:
                self.landed(rank.transfer_of[handle])

    def die(self) -> None:
        """A prefill process dies, proven, and another starts in its place. What it had posted may
        land a little later."""
        old = self.rng.choice(self.prefills)
        theirs = [key for key, party in self.party_of.items() if party is old]
        self.dead[old] = self.clock() + LATE_S, theirs
        new = Party("prefill", 1, self.rng, self.clock, self.ranks)
        self._watch(new)
        self.prefills[self.prefills.index(old)] = new
        self.decode.exchange.part(old.name, proven_dead=True)
        self.party_of = {key: p for key, p in self.party_of.items() if p is not old}
        self.meet()

    def lay_to_rest(self, now_s: float) -> None:
        """Nothing more comes of those who died longer ago."""
        for party, (until_s, transfer_ids) in list(self.dead.items()):
            if now_s >= until_s:
                del self.dead[party]
                self.can_land.update(dict.fromkeys(transfer_ids, 0))

    def meet(self) -> None:
        for party in self.prefills:
            party.exchange.meet(self.decode.transport.endpoint)
            self.decode.exchange.meet(party.transport.endpoint)

    def stray(self) -> None:
        data = self.rng.randbytes(self.rng.randint(0, 80))
        self.rng.choice(self.prefills).transport.notify(self.decode.name, data)

    def turn(self) -> None:
        self.clock.advance(self.rng.choice([0.0, 0.001, 0.05]))
        self.lay_to_rest(self.clock())
        self.rng.choice([self.decode, *self.prefills]).exchange.turn()

    def _any(self) -> bytes:
        return self.rng.choice(list(self.party_of)[-6:])

    def finish(self) -> None:
        """Everything under way lands, every grant is given up, and nothing stays behind."""
        for party in (self.decode, *self.prefills):
            for rank in party.ranks:
                rank.holds = False
        self.lay_to_rest(math.inf)
        self.meet()
        for transfer_id in self.specs:
            self.decode.exchange.receiver.abort(transfer_id)
        for _ in range(3000):
            self.clock.advance(0.05)
            for party in (*self.prefills, self.decode):
                party.exchange.turn()
            self.observe()
            if not self.decode.counters.quarantined_transfers:
                return


SHAPES = (
    Ranks((1, 2, 4), 2, (4,)),
    Ranks((1, 3), 2, (1,)),
    Ranks((2, 8), 4, (8, 2, 4)),
    Ranks((3,), 8, (1, 1)),
    Ranks((1, 4), 2, (2, 4, 1)),
)
"""With and without several ranks that hold the same unit."""
CASES = [(seed, Ranks(count=1 + seed % 3)) for seed in range(6)] + list(enumerate(SHAPES))
MORE = [(seed, Ranks(count=1 + seed % 3)) for seed in range(6, 40)]
MORE += list(enumerate(3 * SHAPES))[len(SHAPES) :]


@pytest.mark.parametrize(
    ("seed", "ranks"), CASES + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]
)
def test_nothing_is_claimed_that_is_not_true(seed: int, ranks: Ranks) -> None:
    model = Model(seed, ranks)
    has_errors = seed % 4 == 0
    steps = [model.turn] * 8 + [model.land] * 3 + [model.begin, model.compute, model.compute]
    steps += [model.stray, model.meet]
    model.grant()
    for number in range(20_000):
        if number >= 2000 and model.ready:
            break  # Where many ranks write to many, few transfers are complete.
        roll = model.rng.random()
        if roll < 0.02 or not model.party_of:
            model.grant()
            if not model.party_of:  # Pages of the dead come back with time.
                model.turn()
        elif roll < 0.025:
            model.rng.choice([model.abort_send, model.abort_receive])()
        elif has_errors and roll < 0.03:
            model.error()
        elif roll < 0.032:
            model.die()
        else:
            model.rng.choice(steps)()
        model.observe()
    model.finish()
    pinned = {key for key, writes in model.can_land.items() if writes}
    stuck = {
        key
        for key in model.specs
        if model.decode.exchange.receiver.state(key) is ReceiveState.QUARANTINED
    }
    assert has_errors or not stuck
    assert pinned <= stuck | model.quiesced | model.ready, "a write was forgotten"
    for party in list(model.prefills):
        model.decode.exchange.part(party.name, proven_dead=True)
        for key in list(model.can_land):
            model.can_land[key] = 0
    for _ in range(2 + round(SETTLING_S / LONGEST_TURN_S)):
        model.clock.advance(LONGEST_TURN_S)
        model.decode.exchange.turn()
    model.observe()
    assert model.ready
    assert model.freed
    assert model.ready | model.freed == set(model.specs)
    for free, group in zip(model.free_pages, ranks.groups, strict=True):
        assert len(free) == group.num_pages - 1, "pages leaked"


def test_errors_are_the_smallest_states() -> None:
    assert min(PushState) is PushState.ERROR
