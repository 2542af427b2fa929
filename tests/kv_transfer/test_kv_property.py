"""Both state machines under every order of events, against a model that sees every write.

Two prefill sides and a decode side over a network that lands pushes in any order, at any time or
never, shows notifications in any order and more than once, and loses questions. The model knows
each write that can still land, which no side does, and checks what each side claims.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from kv_world import NUM_PAGES, PAGE_BYTES, PAGE_TOKENS, FakeClock

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
from kv_transfer.receiving import ReceiveState
from kv_transfer.settling_writes import AFTERMATH_S, LONGEST_TURN_S
from kv_transfer.specs import ReceiveSpec, SendSpec
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import Notification, PageIds, PushState
from kv_transfer.wire import Chunk, MalformedNotification, Quiesce, Quiesced, decode

EPOCH = 3
LATE_S = 0.5
"""What a dead process had posted still lands within this time."""
_serial = itertools.count()


class ChaosTransport(LoopbackTransport):
    """Loopback whose pushes end, and whose notifications appear, when chance says so."""

    def __init__(self, role: str, rng: random.Random) -> None:
        pool = torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8)
        super().__init__(f"{role}-{next(_serial)}", PoolMemory.of(pool, PAGE_BYTES, NUM_PAGES))
        self.pool = pool
        self.holds = True
        self.rng = rng
        self.in_flight: list[Notification] = []
        self.transfer_of: dict[int, bytes] = {}
        self.on_post: Callable[[bytes], None] = lambda transfer_id: None
        self.on_land: Callable[[bytes], None] = lambda transfer_id: None

    def push(self, agent_name: str, source: PageIds, target: PageIds, payload: bytes) -> int:
        handle = super().push(agent_name, source, target, payload)
        match decode(payload):
            case Chunk(transfer_id):
                self.transfer_of[handle] = transfer_id
                self.on_post(transfer_id)
            case _:
                self.land(handle)
        return handle

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


class Party:
    def __init__(self, role: str, epoch: int, rng: random.Random, clock: FakeClock) -> None:
        self.transport = ChaosTransport(role, rng)
        self.events: list[TransferEvent] = []
        self.counters = TransferCounters()
        self.exchange = Exchange(self.transport, epoch, self.events.append, self.counters, clock)
        self.name = self.transport.endpoint.agent_name


class Model:
    """What is true, from outside."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.decode = Party("decode", EPOCH, self.rng, self.clock)
        self.prefills = [Party("prefill", 1, self.rng, self.clock) for _ in range(2)]
        self.party_of: dict[bytes, Party] = {}
        self.specs: dict[bytes, SendSpec] = {}
        self.content: dict[bytes, np.ndarray] = {}
        self.computed: dict[bytes, int] = {}
        self.can_land: dict[bytes, int] = defaultdict(int)
        self.dead: dict[Party, tuple[float, list[bytes]]] = {}
        """Until when what they had posted may land, and of which transfers."""
        self.quiesced: set[bytes] = set()
        self.ready: set[bytes] = set()
        self.freed: set[bytes] = set()
        self.free_pages = list(range(1, NUM_PAGES))
        for party in self.prefills:
            self._watch(party)
        self.meet()

    def _watch(self, party: Party) -> None:
        party.transport.on_post = self.posted
        party.transport.on_land = self.landed

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
        pages = self.decode.transport.pool[torch.from_numpy(spec.target_pages).long()].numpy()
        held = spec.held_pages
        assert (pages[held:] == self.content[transfer_id][held:]).all(), "foreign KV"
        self.ready.add(transfer_id)
        self._give_back(transfer_id)

    def _check_freed(self, transfer_id: bytes) -> None:
        assert transfer_id not in self.ready | self.freed
        assert not self.can_land[transfer_id], "freed with a write under way"
        self.freed.add(transfer_id)
        self._give_back(transfer_id)

    def _give_back(self, transfer_id: bytes) -> None:
        self.free_pages += self.specs[transfer_id].target_pages.tolist()

    def grant(self) -> None:
        party = self.rng.choice(self.prefills)
        num_tokens = self.rng.randint(1, 8 * PAGE_TOKENS)
        num_pages = -(-num_tokens // PAGE_TOKENS)
        if num_pages > len(self.free_pages):
            return
        self.rng.shuffle(self.free_pages)
        target = np.array([self.free_pages.pop() for _ in range(num_pages)], dtype=np.int32)
        source = np.array(self.rng.sample(range(1, NUM_PAGES), num_pages), dtype=np.int32)
        transfer_id = self.rng.randbytes(16)
        held = self.rng.choice([0, 0, self.rng.randint(0, num_pages)])
        self.party_of[transfer_id] = party
        self.specs[transfer_id] = SendSpec(
            transfer_id, self.decode.name, EPOCH, source, target, held, num_tokens, PAGE_TOKENS
        )
        self.computed[transfer_id] = 0
        timeout_s = self.rng.choice([0.5, 100.0, 100.0])
        self.decode.exchange.receiver.expect(
            ReceiveSpec(transfer_id, party.name, num_pages, held, num_tokens, timeout_s)
        )

    def begin(self) -> None:
        transfer_id = self._any()
        self.party_of[transfer_id].exchange.sender.begin(self.specs[transfer_id])

    def compute(self) -> None:
        """Source pages are one transfer's until the model sees it quiesced: here, written once."""
        transfer_id = self._any()
        spec, party = self.specs[transfer_id], self.party_of[transfer_id]
        if transfer_id not in self.content:
            self._fill(transfer_id, spec, party)
        done = self.computed[transfer_id] = min(
            spec.num_tokens, self.computed[transfer_id] + self.rng.randint(1, 60)
        )
        payload = b"tokens" if done == spec.num_tokens and self.rng.random() < 0.8 else None
        party.exchange.sender.chunk_computed(transfer_id, done, payload)

    def _fill(self, transfer_id: bytes, spec: SendSpec, party: Party) -> None:
        """Each page holds the same bytes always, so transfers may share source pages."""
        stamp = spec.source_pages.astype(np.uint8)[:, None] + 100 * self.prefills.index(party)
        self.content[transfer_id] = np.broadcast_to(stamp, (spec.num_pages, PAGE_BYTES))
        pages = torch.from_numpy(spec.source_pages).long()
        party.transport.pool[pages] = torch.from_numpy(self.content[transfer_id].copy())

    def abort_send(self) -> None:
        transfer_id = self._any()
        self.party_of[transfer_id].exchange.sender.abort(transfer_id)

    def abort_receive(self) -> None:
        self.decode.exchange.receiver.abort(self._any())

    def land(self) -> None:
        party = self.rng.choice([*self.prefills, *self.dead])
        if party.transport.held_pushes:
            party.transport.land(self.rng.choice(party.transport.held_pushes))

    def error(self) -> None:
        """A write that landed all the same, or that may land for as long as its process lives."""
        party = self.rng.choice(self.prefills)
        if party.transport.held_pushes:
            handle = self.rng.choice(party.transport.held_pushes)
            lands = self.rng.random() < 0.5
            party.transport.fail(handle, lands)
            if lands:
                self.landed(party.transport.transfer_of[handle])

    def die(self) -> None:
        """A prefill process dies, proven, and another starts in its place. What it had posted may
        land a little later."""
        old = self.rng.choice(self.prefills)
        theirs = [key for key, party in self.party_of.items() if party is old]
        self.dead[old] = self.clock() + LATE_S, theirs
        new = Party("prefill", 1, self.rng, self.clock)
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
            party.transport.holds = False
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


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_claimed_that_is_not_true(seed: int) -> None:
    model = Model(seed)
    has_errors = seed % 4 == 0
    steps = [model.turn] * 8 + [model.land] * 3 + [model.begin, model.compute, model.compute]
    steps += [model.stray, model.meet]
    model.grant()
    for _ in range(2000):
        roll = model.rng.random()
        if roll < 0.02 or not model.party_of:
            model.grant()
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
    for _ in range(2 + round(AFTERMATH_S / LONGEST_TURN_S)):
        model.clock.advance(LONGEST_TURN_S)
        model.decode.exchange.turn()
    model.observe()
    assert model.ready
    assert model.freed
    assert model.ready | model.freed == set(model.specs)
    assert len(model.free_pages) == NUM_PAGES - 1, "pages leaked"


def test_errors_are_the_smallest_states() -> None:
    assert min(PushState) is PushState.ERROR
