"""The admission queue: jobs that wait for a worker with room.

Life of an entry: pushed (or refused at once) -> at the head -> taken, removed by its owner, or
timed out. Each model has a lane of its own, so that a busy model holds up nobody else's requests;
within a lane resumed work goes first, then higher priority, then the earlier arrival.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from router import errors

MIN_RETRY_AFTER_S: Final = 0.5
MAX_RETRY_AFTER_S: Final = 60.0
DRAIN_WINDOW_S: Final = 10.0
"""Memory of the drain rate: long enough to span bursts, short enough to see a lost worker."""
AT_ONCE_S: Final = 1e-3
"""An entry that leaves this soon never waited."""


class Waiting(Protocol):
    """What can wait."""

    @property
    def lane(self) -> str:
        """The model it needs."""
        ...

    @property
    def tokens(self) -> int:
        """Prompt tokens."""
        ...

    @property
    def order(self) -> tuple[bool, int]:
        """Smaller goes first: (not resumed, minus priority)."""
        ...


Entry = TypeVar("Entry", bound=Waiting)


class DrainMeter:
    """Tokens per second that leave the queue while something waits in it.

    Idle time says nothing about how fast a backlog drains, nor does work that never had to wait:
    neither is counted. Tokens and seconds of backlog both decay with `DRAIN_WINDOW_S`.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0

    def backlog(self, duration_s: float) -> None:
        """Something waited during the last `duration_s`."""
        kept = math.exp(-duration_s / DRAIN_WINDOW_S)
        self._tokens *= kept
        self._busy_s = self._busy_s * kept + DRAIN_WINDOW_S * (1 - kept)

    def left(self, tokens: int) -> None:
        """These tokens had waited and left."""
        self._tokens += tokens

    def tokens_per_s(self) -> float:
        """The rate; 0 while unknown."""
        return self._tokens / self._busy_s if self._busy_s else 0.0


class _Place(NamedTuple):
    order: tuple[bool, int]
    ticket: int
    pushed_s: float


class AdmissionQueue(Generic[Entry]):
    """Bounded by entries and by prompt tokens, over all lanes.

    Invariant: `tokens` is the sum over the entries; lanes are sorted by place.
    """

    def __init__(self, max_entries: int, max_tokens: int) -> None:
        self._max_entries = max_entries
        self._max_tokens = max_tokens
        self._lanes: dict[str, list[tuple[_Place, Entry]]] = {}
        self._tickets = 0
        self.tokens = 0
        """Prompt tokens waiting."""
        self._drain = DrainMeter()
        self._seen_s = 0.0

    def __len__(self) -> int:
        return sum(len(lane) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[Entry]:
        return iter([entry for lane in self._lanes.values() for _, entry in lane])

    def push(self, entry: Entry, now_s: float, *, bounded: bool = True) -> None:
        """Adds an entry behind its equals. The empty queue has room for an entry of any size.

        Args:
            entry: what waits.
            now_s: a steady clock.
            bounded: False for work that was accepted before and comes back.

        Raises:
            RouterError: QUEUE_FULL.
        """
        full = len(self) >= self._max_entries or self.tokens + entry.tokens > self._max_tokens
        if bounded and full and len(self) > 0:
            raise errors.queue_full(len(self), self.retry_after_s(now_s))
        self._advance(now_s)
        self._tickets += 1
        place = _Place(entry.order, self._tickets, now_s)
        lane = self._lanes.setdefault(entry.lane, [])
        bisect.insort(lane, (place, entry), key=lambda item: item[0])
        self.tokens += entry.tokens

    def heads(self) -> list[Entry]:
        """The next entry of each lane."""
        return [lane[0][1] for lane in self._lanes.values()]

    def take(self, entry: Entry, now_s: float) -> float:
        """Removes an entry that is dispatched now; returns how long it waited, seconds."""
        place = self.remove(entry, now_s)
        waited_s = now_s - place.pushed_s if place is not None else 0.0
        if waited_s > AT_ONCE_S:
            self._drain.left(entry.tokens)
        return waited_s

    def remove(self, entry: Entry, now_s: float) -> _Place | None:
        """Removes an entry, if it is there; returns the place it had."""
        self._advance(now_s)
        lane = self._lanes.get(entry.lane, [])
        for index, (place, waiting) in enumerate(lane):
            if waiting is entry:
                del lane[index]
                self.tokens -= entry.tokens
                if not lane:
                    del self._lanes[entry.lane]
                return place
        return None

    def wait_s(self, now_s: float) -> float | None:
        """How long what waits takes to drain; None while nothing was measured."""
        self._advance(now_s)
        if not self.tokens:
            return 0.0
        rate = self._drain.tokens_per_s()
        return self.tokens / rate if rate else None

    def retry_after_s(self, now_s: float) -> float:
        """When a refused client may find room, by the measured drain rate."""
        wait_s = self.wait_s(now_s)
        if wait_s is None:
            return MAX_RETRY_AFTER_S
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s))

    def _advance(self, now_s: float) -> None:
        if self._lanes:
            self._drain.backlog(now_s - self._seen_s)
        self._seen_s = now_s
