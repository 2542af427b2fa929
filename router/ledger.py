"""What a worker's next load report will say: its last one, corrected by what we know better.

Reports come a tenth of a second apart, and a burst must not pile up on the worker that looked idle
in the last one. So the router keeps a *charge* per attempt and worker:

1. charged at dispatch: counted on top of the report, which does not know it yet;
2. received: a report that came later contains its prompt, which is not counted twice; known, a
   moment later: what its engine gave it, too;
3. released when its prefill or the attempt is over: what a report contained is given back.

Prompts are computed in the order in which they came, as far as this router knows: what a report
says is computed of those it knows is taken to be of the oldest, which is its *head*.

Invariant: the ledger holds one charge for each part of an attempt that is open at the worker, and
none else; without open attempts and after a report, the estimate is that report.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from baton.worker.v1 import worker_pb2

REPORT_LAG_S: Final = 0.05
"""An engine may take this long to give slots and pages: those of younger charges are not in a
report, which has their prompts as soon as they are received."""


class Charge(NamedTuple):
    """What an attempt takes of a worker."""

    prefill_tokens: int = 0
    pages: int = 0
    sequences: int = 0


@dataclass(slots=True)
class _Entry:
    charge: Charge
    at_s: float
    number: int = 0
    """As the worker counts submits; 0 before it is sent."""
    received: bool = False
    known: bool = False
    computed_tokens: int = 0
    """Of its prompt, by the last report."""


class Room(NamedTuple):
    """What a worker has, by the router's estimate."""

    queued_prefill_tokens: int
    prefill_credit_tokens: int
    prefill_tokens_per_s: float
    """0 while unknown."""
    step_ms: float
    """A recent step."""
    running_sequences: int
    max_sequences: int
    free_pages: int
    """Evictable ones included."""
    total_pages: int
    head_tokens: int = 0
    """Of the prompt that it computes now, the whole of it."""
    head_computed_tokens: int = 0
    """Of those not counted as queued any more."""
    head_s: float = 0.0
    """For how long it has computed that."""

    @property
    def free_sequences(self) -> int:
        """Slots that nobody holds or was promised."""
        return self.max_sequences - self.running_sequences

    def wait_s(self, tokens_per_s: float) -> float:
        """Until everything queued is computed at that rate: a prompt is as far as the time since
        its begin says, even where the last report knew less of it."""
        head_tokens = min(self.head_tokens, self.head_s * tokens_per_s)
        since_report = max(0.0, head_tokens - self.head_computed_tokens)
        return max(0.0, self.queued_prefill_tokens - since_report) / tokens_per_s


class Ledger:
    """Charges against one worker."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._load = worker_pb2.Load()
        self._entries: dict[bytes, _Entry] = {}
        self._returned = Charge()
        self._room: Room | None = None
        """The estimate, until something changes: who looks for a route asks ten times."""
        self._sent = 0
        self._head: bytes | None = None
        self._head_since_s = 0.0

    @property
    def load(self) -> worker_pb2.Load:
        """The last report; empty before the first."""
        return self._load

    @property
    def open_charges(self) -> int:
        """How many attempts are charged."""
        return len(self._entries)

    def report(self, load: worker_pb2.Load) -> None:
        """Takes a report that came now."""
        self._load, self._room = load, None
        now_s = self._clock()
        self._returned = Charge()
        received = []
        for entry in self._entries.values():
            entry.received = 0 < entry.number <= load.submits
            entry.known = entry.known or (entry.received and now_s - entry.at_s >= REPORT_LAG_S)
            if entry.received:
                received.append(entry)
        computed = sum(one.charge.prefill_tokens for one in received) - load.queued_prefill_tokens
        for entry in received:
            entry.computed_tokens = max(0, min(computed, entry.charge.prefill_tokens))
            computed -= entry.computed_tokens

    def charge(self, attempt_id: bytes, charge: Charge) -> None:
        """Counts an attempt submitted now."""
        self._entries[attempt_id] = _Entry(charge, self._clock())
        self._changed()

    def sent(self, attempt_id: bytes) -> None:
        """Its submit goes to the worker, which counts it next. One that its own Cancel overtook
        never does."""
        self._sent += 1
        if (entry := self._entries.get(attempt_id)) is not None:
            entry.number = self._sent

    def prefilled(self, attempt_id: bytes) -> None:
        """The attempt's prompt is computed: its credit is free again."""
        if (entry := self._entries.get(attempt_id)) is None:
            return
        self._give_back(entry, Charge(prefill_tokens=entry.charge.prefill_tokens))
        entry.charge, entry.computed_tokens = entry.charge._replace(prefill_tokens=0), 0
        self._changed()

    def release(self, attempt_id: bytes) -> None:
        """The attempt is over here. Releasing twice does nothing."""
        if (entry := self._entries.pop(attempt_id, None)) is not None:
            self._give_back(entry, entry.charge)
            self._changed()

    def room(self) -> Room:
        """The estimate."""
        if self._room is None:
            self._room = self._estimate()
        if self._head is None:
            return self._room
        return self._room._replace(head_s=self._clock() - self._head_since_s)

    def _changed(self) -> None:
        """The entries did: another one may be the head."""
        self._room = None
        prompts = (name for name, one in self._entries.items() if one.charge.prefill_tokens)
        head = next(prompts, None)
        if head != self._head:
            self._head, self._head_since_s = head, self._clock()

    def _estimate(self) -> Room:
        """A slot that was granted is not running yet: open charges are a lower bound of those."""
        load, returned = self._load, self._returned
        head = self._entries[self._head] if self._head is not None else None
        entries = self._entries.values()
        fresh = _sum([_part(one.charge, not one.received, not one.known) for one in entries])
        queued = max(0, load.queued_prefill_tokens + fresh.prefill_tokens - returned.prefill_tokens)
        capacity_tokens = load.queued_prefill_tokens + load.prefill_credit_tokens
        promised = sum(entry.charge.sequences for entry in self._entries.values())
        running = load.running_sequences + fresh.sequences - returned.sequences
        usable_pages = load.free_pages + load.evictable_pages - fresh.pages + returned.pages
        return Room(
            queued_prefill_tokens=queued,
            prefill_credit_tokens=capacity_tokens - queued,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            step_ms=load.step_ms,
            running_sequences=max(running, promised),
            max_sequences=load.max_sequences,
            free_pages=min(load.total_pages, usable_pages),
            total_pages=load.total_pages,
            head_tokens=head.charge.prefill_tokens if head else 0,
            head_computed_tokens=head.computed_tokens if head else 0,
        )

    def _give_back(self, entry: _Entry, charge: Charge) -> None:
        """What the report contained of it; a charge is all or nothing of the prompt."""
        left = charge._replace(prefill_tokens=max(0, charge.prefill_tokens - entry.computed_tokens))
        self._returned = _sum([self._returned, _part(left, entry.received, entry.known)])


def _part(charge: Charge, prompt: bool, rest: bool) -> Charge:
    """Its prompt, or the rest of it, or both."""
    tokens, pages, sequences = charge
    return Charge(tokens if prompt else 0, pages if rest else 0, sequences if rest else 0)


def _sum(charges: list[Charge]) -> Charge:
    return Charge(*(sum(column) for column in zip(Charge(), *charges, strict=True)))
