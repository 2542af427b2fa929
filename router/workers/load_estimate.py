"""What a worker's next load report will say: its last one, corrected by what the router knows.

Reports come a tenth of a second apart, and a burst must not pile up on the worker that looked idle
in the last one. So the router keeps a *reservation* for each attempt at each worker:

1. Reserved at dispatch: it is counted on top of the report.
2. Known: a report names the attempt among those that its figures contain. It counts no longer.
3. Released, as the prompt is computed or the attempt is over: what the last report contains of it
   is given back until the next one comes.

Invariant: there is one reservation for each part of an attempt that is open at the worker, and none
else. Without open attempts and after a report, the estimate is that report.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from baton.worker.v1 import worker_pb2


class Reservation(NamedTuple):
    """What an attempt takes of a worker."""

    prefill_tokens: int = 0
    pages: int = 0
    sequences: int = 0


@dataclass(slots=True)
class _Entry:
    reservation: Reservation
    holder: str
    known: bool = False
    """The last report contains it."""


class Capacity(NamedTuple):
    """What a worker has, by the router's estimate."""

    queued_prefill_tokens: int
    """Prompt tokens that it has taken on and not computed."""
    prefill_credit_tokens: int
    prefill_tokens_per_s: float
    """A moving average over its steps; 0 while unknown."""
    prefill_rate_age_s: float
    """Since a step last added to that rate, as of the last report."""
    running_sequences: int
    max_sequences: int
    free_pages: int
    """Evictable ones included."""
    total_pages: int

    @property
    def free_sequences(self) -> int:
        """Slots that nobody holds or was promised."""
        return self.max_sequences - self.running_sequences


class LoadEstimate:
    """Reservations at one worker."""

    def __init__(self) -> None:
        self._load = worker_pb2.Load()
        self._entries: dict[bytes, _Entry] = {}
        self._held: Counter[str] = Counter()
        """Sequences of the entries, by holder."""
        self._returned = Reservation()
        """Released since the last report, which contains it."""
        self._capacity: Capacity | None = None
        """The estimate, until something changes: who looks for a route asks ten times."""

    @property
    def load(self) -> worker_pb2.Load:
        """The last report; empty before the first."""
        return self._load

    @property
    def open_reservations(self) -> int:
        """How many attempts have one."""
        return len(self._entries)

    def report(self, load: worker_pb2.Load) -> None:
        """Takes a report that came now."""
        self._load, self._capacity = load, None
        self._returned = Reservation()
        for attempt_id in load.known_attempts:
            if (entry := self._entries.get(attempt_id)) is not None:
                entry.known = True

    def reserve(self, attempt_id: bytes, reservation: Reservation, holder: str = "") -> None:
        """Counts an attempt that is submitted now, for whoever holds its slots."""
        self._entries[attempt_id] = _Entry(reservation, holder)
        self._held[holder] += reservation.sequences
        self._capacity = None

    def held(self, holder: str) -> int:
        """Slots that a holder has here, of this router's attempts."""
        return self._held[holder]

    def prefilled(self, attempt_id: bytes) -> None:
        """The attempt's prompt is computed: its credit is free again."""
        if (entry := self._entries.get(attempt_id)) is not None:
            self._give_back(entry, Reservation(prefill_tokens=entry.reservation.prefill_tokens))
            entry.reservation = entry.reservation._replace(prefill_tokens=0)

    def release(self, attempt_id: bytes) -> None:
        """The attempt is over here. Releasing twice does nothing."""
        if (entry := self._entries.pop(attempt_id, None)) is not None:
            self._held[entry.holder] -= entry.reservation.sequences
            if not self._held[entry.holder]:
                del self._held[entry.holder]
            self._give_back(entry, entry.reservation)

    def capacity(self) -> Capacity:
        """The estimate."""
        if self._capacity is None:
            self._capacity = self._estimate()
        return self._capacity

    def _estimate(self) -> Capacity:
        """A slot that was granted does not run yet: open reservations are a lower bound of slots
        in use."""
        load, returned = self._load, self._returned
        entries = self._entries.values()
        fresh = _sum([entry.reservation for entry in entries if not entry.known])
        queued = max(0, load.queued_prefill_tokens + fresh.prefill_tokens - returned.prefill_tokens)
        capacity_tokens = load.queued_prefill_tokens + load.prefill_credit_tokens
        promised = sum(entry.reservation.sequences for entry in entries)
        running = load.running_sequences + load.wanted_sequences
        running += fresh.sequences - returned.sequences
        usable_pages = load.free_pages + load.evictable_pages - load.wanted_pages
        usable_pages += returned.pages - fresh.pages
        return Capacity(
            queued_prefill_tokens=queued,
            prefill_credit_tokens=capacity_tokens - queued,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            prefill_rate_age_s=load.prefill_rate_age_s,
            running_sequences=max(running, promised),
            max_sequences=load.max_sequences,
            free_pages=min(load.total_pages, usable_pages),
            total_pages=load.total_pages,
        )

    def _give_back(self, entry: _Entry, reservation: Reservation) -> None:
        self._capacity = None
        if entry.known:
            self._returned = _sum([self._returned, reservation])


def _sum(reservations: list[Reservation]) -> Reservation:
    return Reservation(*(sum(column) for column in zip(Reservation(), *reservations, strict=True)))
