"""Estimates a worker's next load report from its last one and the router's own reservations.

Reports come a tenth of a second apart. A burst must not pile up on the worker that looked idle in
the last one. So the router keeps a *reservation* for each attempt at each worker:

1. Reserved, at dispatch. The reservation is added to the report.
2. Known: a report names the attempt among those that its numbers contain. The reservation is no
   longer added.
3. Released: the prompt is computed or the attempt is over. The attempt's part in the last report is
   subtracted until the next report comes.

Invariants: there is exactly one reservation for each open leg at the worker. Without open attempts
and after a report, the estimate is that report. Sums are kept, so that the estimate takes no longer
where many attempts are open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

from baton.worker.v1 import worker_pb2
from serving.wire import MOST_ADAPTERS


class Reservation(NamedTuple):
    """The part of a worker's capacity that an attempt takes."""

    prefill_tokens: int = 0
    pages: int = 0
    sequences: int = 0

    def more(self, other: Reservation) -> Reservation:
        """Both together."""
        return Reservation(
            self.prefill_tokens + other.prefill_tokens,
            self.pages + other.pages,
            self.sequences + other.sequences,
        )

    def less(self, other: Reservation) -> Reservation:
        """This one without the other, which is a part of it."""
        return Reservation(
            self.prefill_tokens - other.prefill_tokens,
            self.pages - other.pages,
            self.sequences - other.sequences,
        )


@dataclass(slots=True)
class _Entry:
    reservation: Reservation
    holder: str
    adapter: bytes
    known: bool = False
    """Whether the last report contains it."""


class Capacity(NamedTuple):
    """A worker's capacity, by the router's estimate."""

    queued_prefill_tokens: int
    """Prompt tokens that it has taken on and not computed."""
    prefill_credit_tokens: int
    prefill_tokens_per_s: float
    """Moving average over its steps; 0 while unknown."""
    prefill_rate_age_s: float
    """Time since a step last added to that rate, as of the last report."""
    running_sequences: int
    max_sequences: int
    free_pages: int
    """Free pages, with evictable ones."""
    total_pages: int
    prefill_token_s: float = 0.0
    """Time to compute a prompt token without tokens before it; 0 while unknown."""
    prefill_context_s: float = 0.0
    """How much longer it takes for each token before it."""
    piece_delay_s: float = 0.0
    """How much longer a step that decodes takes with a prompt's chunk; 0 while unknown."""
    piece_tokens: float = 0.0
    """Prompt tokens of such a chunk, on average."""
    load_bytes_per_s: float = 0.0
    """Rate of loads from host memory; 0: there is no such tier."""
    fetch_latency_s: float = 0.0
    """What fetches from peers take beyond the time for their bytes; 0 while unknown."""

    @property
    def free_sequences(self) -> int:
        """Slots that are neither used nor reserved."""
        return self.max_sequences - self.running_sequences


class LoadEstimate:
    """Reservations at one worker."""

    def __init__(self) -> None:
        self._load = worker_pb2.Load()
        self.in_slots: frozenset[int] | None = None
        """Short keys of the adapters in slots; None: the worker does not say."""
        self.draining = False
        """Whether the last report refuses new work."""
        self._entries: dict[bytes, _Entry] = {}
        self._held: Counter[str] = Counter()
        """Sequences of the entries, by holder."""
        self._adapters: Counter[bytes] = Counter()
        """Entries by the digest of their adapter."""
        self._fresh = Reservation()
        """Sum of the reservations that the last report does not contain."""
        self._promised = 0
        """Sequences of all entries."""
        self._returned = Reservation()
        """Reservations released since the last report, which contains them."""
        self._capacity: Capacity | None = None
        """The estimate, kept until something changes. A search for a route reads it ten times."""

    @property
    def load(self) -> worker_pb2.Load:
        """The last report; empty before the first."""
        return self._load

    @property
    def open_reservations(self) -> int:
        """The number of open reservations."""
        return len(self._entries)

    def report(self, load: worker_pb2.Load) -> None:
        """Takes a new report."""
        self._load, self._capacity, self.draining = load, None, load.draining
        self._returned = Reservation()
        self.in_slots = None
        if load.HasField("adapters"):
            del load.adapters.in_slots[MOST_ADAPTERS:], load.adapters.in_host[MOST_ADAPTERS:]
            self.in_slots = frozenset(load.adapters.in_slots)
        for attempt_id in load.known_attempts:
            entry = self._entries.get(attempt_id)
            if entry is not None and not entry.known:
                entry.known = True
                self._fresh = self._fresh.less(entry.reservation)

    def reserve(
        self, attempt_id: bytes, reservation: Reservation, holder: str = "", adapter: bytes = b""
    ) -> None:
        """Counts an attempt that is submitted now, for whoever holds its slots, with the digest of
        its adapter."""
        self._entries[attempt_id] = _Entry(reservation, holder, adapter)
        self._held[holder] += reservation.sequences
        if adapter:
            self._adapters[adapter] += 1
        self._promised += reservation.sequences
        self._fresh = self._fresh.more(reservation)
        self._capacity = None

    def held(self, holder: str) -> int:
        """Slots that a holder has here, of this router's attempts."""
        return self._held[holder]

    @property
    def adapters(self) -> Set[bytes]:
        """Digests of the adapters of this router's open attempts."""
        return self._adapters.keys()

    def charge(self, attempt_id: bytes, prefill_tokens: int) -> None:
        """The worker said how many tokens of the attempt's prompt it has to compute."""
        if (entry := self._entries.get(attempt_id)) is not None:
            self._capacity = None
            before = entry.reservation
            entry.reservation = before._replace(prefill_tokens=prefill_tokens)
            if not entry.known:
                self._fresh = self._fresh.less(before).more(entry.reservation)

    def prefilled(self, attempt_id: bytes) -> None:
        """The attempt's prompt is computed: its credit is free again."""
        if (entry := self._entries.get(attempt_id)) is not None:
            self._give_back(entry, Reservation(prefill_tokens=entry.reservation.prefill_tokens))
            entry.reservation = entry.reservation._replace(prefill_tokens=0)

    def release(self, attempt_id: bytes) -> None:
        """The attempt is over at this worker. A second release does nothing."""
        if (entry := self._entries.pop(attempt_id, None)) is not None:
            self._held[entry.holder] -= entry.reservation.sequences
            if not self._held[entry.holder]:
                del self._held[entry.holder]
            if entry.adapter:
                self._adapters[entry.adapter] -= 1
                if not self._adapters[entry.adapter]:
                    del self._adapters[entry.adapter]
            self._promised -= entry.reservation.sequences
            self._give_back(entry, entry.reservation)

    def capacity(self) -> Capacity:
        """The estimate."""
        if self._capacity is None:
            self._capacity = self._estimate()
        return self._capacity

    def _estimate(self) -> Capacity:
        """Computes the estimate. A granted slot does not run yet, so the number of open
        reservations is a lower bound of the slots in use."""
        load, returned, fresh = self._load, self._returned, self._fresh
        queued = max(0, load.queued_prefill_tokens + fresh.prefill_tokens - returned.prefill_tokens)
        capacity_tokens = load.queued_prefill_tokens + load.prefill_credit_tokens
        running = load.running_sequences + load.wanted_sequences
        running += fresh.sequences - returned.sequences
        usable_pages = load.free_pages + load.evictable_pages - load.wanted_pages
        usable_pages += returned.pages - fresh.pages
        return Capacity(
            queued_prefill_tokens=queued,
            prefill_credit_tokens=capacity_tokens - queued,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            prefill_rate_age_s=load.prefill_rate_age_s,
            running_sequences=max(running, self._promised),
            max_sequences=load.max_sequences,
            free_pages=min(load.total_pages, usable_pages),
            total_pages=load.total_pages,
            prefill_token_s=load.prefill_token_s,
            prefill_context_s=load.prefill_context_s,
            piece_delay_s=load.piece_delay_ms / 1e3,
            piece_tokens=load.piece_tokens,
            load_bytes_per_s=load.load_gigabytes_per_s * 1e9,
            fetch_latency_s=load.fetch_latency_ms / 1e3,
        )

    def _give_back(self, entry: _Entry, reservation: Reservation) -> None:
        self._capacity = None
        if entry.known:
            self._returned = self._returned.more(reservation)
        else:
            self._fresh = self._fresh.less(reservation)
