"""What a worker's next load report will say: its last one, corrected by what we know better.

Reports come up to half a second apart, and a burst must not pile up on the worker that looked idle
in the last one. So the router keeps a *charge* per attempt and worker:

1. charged at dispatch: counted on top of the report, which does not know it yet;
2. known: a report that came later contains it, and it is not counted twice;
3. released when its prefill or the attempt is over: what a report contained is given back.

Invariant: the ledger holds one charge for each part of an attempt that is open at the worker, and
none else; without open attempts and after a report, the estimate is that report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from baton.worker.v1 import worker_pb2

REPORT_LAG_S: Final = 0.05
"""A report may have been written this long before it is read: younger charges are not in it."""


class Charge(NamedTuple):
    """What an attempt takes of a worker."""

    prefill_tokens: int = 0
    pages: int = 0
    sequences: int = 0


@dataclass(slots=True)
class _Entry:
    charge: Charge
    at_s: float
    known: bool = False


class Room(NamedTuple):
    """What a worker has, by the router's estimate."""

    queued_prefill_tokens: int
    prefill_credit_tokens: int
    prefill_tokens_per_s: float
    """0 while unknown."""
    mixed_prefill_tokens: int
    """Most prompt tokens in a step that decodes, too."""
    mixed_prefill_tokens_per_s: float
    """In such steps; 0 while unknown."""
    step_ms: float
    """A recent step."""
    running_sequences: int
    max_sequences: int
    free_pages: int
    """Evictable ones included."""
    total_pages: int

    @property
    def free_sequences(self) -> int:
        """Slots that nobody holds or was promised."""
        return self.max_sequences - self.running_sequences


class Ledger:
    """Charges against one worker."""

    def __init__(self) -> None:
        self._load = worker_pb2.Load()
        self._entries: dict[bytes, _Entry] = {}
        self._returned = Charge()
        self._room: Room | None = None
        """The estimate, until something changes: who looks for a route asks ten times."""

    @property
    def load(self) -> worker_pb2.Load:
        """The last report; empty before the first."""
        return self._load

    @property
    def open_charges(self) -> int:
        """How many attempts are charged."""
        return len(self._entries)

    def report(self, load: worker_pb2.Load, now_s: float) -> None:
        """Takes a report that came at `now_s` (any steady clock)."""
        self._load, self._room = load, None
        self._returned = Charge()
        for entry in self._entries.values():
            entry.known = entry.known or now_s - entry.at_s >= REPORT_LAG_S

    def charge(self, attempt_id: bytes, charge: Charge, now_s: float) -> None:
        """Counts an attempt submitted now."""
        self._entries[attempt_id] = _Entry(charge, now_s)
        self._room = None

    def prefilled(self, attempt_id: bytes) -> None:
        """The attempt's prompt is computed: its credit is free again."""
        if (entry := self._entries.get(attempt_id)) is None:
            return
        self._give_back(entry, Charge(prefill_tokens=entry.charge.prefill_tokens))
        entry.charge = entry.charge._replace(prefill_tokens=0)
        self._room = None

    def release(self, attempt_id: bytes) -> None:
        """The attempt is over here. Releasing twice does nothing."""
        if (entry := self._entries.pop(attempt_id, None)) is not None:
            self._give_back(entry, entry.charge)
            self._room = None

    def room(self) -> Room:
        """The estimate."""
        if self._room is None:
            self._room = self._estimate()
        return self._room

    def _estimate(self) -> Room:
        """A slot that was granted is not running yet: open charges are a lower bound of those."""
        load, returned = self._load, self._returned
        fresh = _sum([entry.charge for entry in self._entries.values() if not entry.known])
        queued = max(0, load.queued_prefill_tokens + fresh.prefill_tokens - returned.prefill_tokens)
        capacity_tokens = load.queued_prefill_tokens + load.prefill_credit_tokens
        promised = sum(entry.charge.sequences for entry in self._entries.values())
        running = load.running_sequences + fresh.sequences - returned.sequences
        usable_pages = load.free_pages + load.evictable_pages - fresh.pages + returned.pages
        return Room(
            queued_prefill_tokens=queued,
            prefill_credit_tokens=capacity_tokens - queued,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            mixed_prefill_tokens=load.mixed_prefill_tokens,
            mixed_prefill_tokens_per_s=load.mixed_prefill_tokens_per_s,
            step_ms=load.step_ms,
            running_sequences=max(running, promised),
            max_sequences=load.max_sequences,
            free_pages=min(load.total_pages, usable_pages),
            total_pages=load.total_pages,
        )

    def _give_back(self, entry: _Entry, charge: Charge) -> None:
        if entry.known:
            self._returned = _sum([self._returned, charge])


def _sum(charges: list[Charge]) -> Charge:
    return Charge(*(sum(column) for column in zip(Charge(), *charges, strict=True)))
