"""The admission queue: jobs that wait for a worker with capacity.

Life of an entry: pushed (or refused at once) -> at the head -> taken, removed by its owner, or
timed out. Each model has a queue of its own, so that a busy model does not delay requests for
others. In a queue, resumed work goes first, then higher priority, then the earlier arrival.
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
"""Time over which the drain rate decays, seconds. It spans bursts and still shows a lost worker."""
FORETOLD: Final = 20
"""The drain rate is unknown for a prompt that is this many times as long as all tokens that left. A
few tokens that waited for a moment say little about many long prompts. Without this rule the router
refused long prompts because of them."""
AT_ONCE_S: Final = 1e-3
"""An entry that leaves within this many seconds did not wait."""


class Waiting(Protocol):
    """An entry of the queue."""

    @property
    def model(self) -> str:
        """The model it needs."""
        ...

    @property
    def tokens(self) -> int:
        """Prompt tokens."""
        ...

    @property
    def order(self) -> tuple[bool, int]:
        """(not resumed, minus priority). Smaller goes first."""
        ...


Entry = TypeVar("Entry", bound=Waiting)


class DrainMeter:
    """Measures the tokens per second that leave the queue while entries wait in it.

    Idle time and work that did not wait say nothing about the drain of a backlog, so neither
    counts. Tokens and seconds of backlog both decay with `DRAIN_WINDOW_S`.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._busy_s = 0.0
        self._seen_tokens = 0
        """All tokens that left. It does not decay."""

    def backlog(self, duration_s: float) -> None:
        """Entries waited during the last `duration_s` seconds."""
        kept = math.exp(-duration_s / DRAIN_WINDOW_S)
        self._tokens *= kept
        self._busy_s = self._busy_s * kept + DRAIN_WINDOW_S * (1 - kept)

    def left(self, tokens: int) -> None:
        """Tokens left the queue after a wait."""
        self._tokens += tokens
        self._seen_tokens += tokens

    def tokens_per_s(self, next_tokens: int) -> float:
        """The rate; 0 while unknown. It is also unknown for a prompt that is at least `FORETOLD`
        times as long as all tokens that left."""
        if not self._busy_s or FORETOLD * self._seen_tokens <= next_tokens:
            return 0.0
        return self._tokens / self._busy_s


class _Place(NamedTuple):
    order: tuple[bool, int]
    ticket: int
    pushed_s: float


class _ModelQueue(Generic[Entry]):
    """The entries that wait for one model, and their drain rate.

    Invariant: `tokens` is the sum over the entries. The entries are sorted by place.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[_Place, Entry]] = []
        self.tokens = 0
        self._drain = DrainMeter()
        self._seen_s = 0.0

    def add(self, place: _Place, entry: Entry) -> None:
        self._advance(place.pushed_s)
        bisect.insort(self.waiting, (place, entry), key=lambda item: item[0])
        self.tokens += entry.tokens

    def remove(self, entry: Entry, now_s: float) -> _Place | None:
        self._advance(now_s)
        for index, (place, waiting) in enumerate(self.waiting):
            if waiting is entry:
                del self.waiting[index]
                self.tokens -= entry.tokens
                return place
        return None

    def drained(self, tokens: int) -> None:
        self._drain.left(tokens)

    def wait_s(self, now_s: float) -> float | None:
        self._advance(now_s)
        if not self.tokens:
            return 0.0
        rate = self._drain.tokens_per_s(self.waiting[0][1].tokens)
        return self.tokens / rate if rate else None

    def _advance(self, now_s: float) -> None:
        if self.waiting:
            self._drain.backlog(now_s - self._seen_s)
        self._seen_s = now_s


class AdmissionQueue(Generic[Entry]):
    """A queue for each model, bounded by entries and by prompt tokens. An overloaded model refuses
    only its own requests. An empty queue is kept for its measured drain rate."""

    def __init__(self, max_entries: int, max_tokens: int) -> None:
        self._max_entries = max_entries
        self._max_tokens = max_tokens
        self._queues: dict[str, _ModelQueue[Entry]] = {}
        self._tickets = 0

    def __len__(self) -> int:
        return sum(len(queue.waiting) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Entry]:
        return iter([entry for queue in self._queues.values() for _, entry in queue.waiting])

    @property
    def tokens(self) -> int:
        """Prompt tokens waiting in all queues."""
        return sum(queue.tokens for queue in self._queues.values())

    def ahead(self, model: str) -> tuple[int, int]:
        """Number of entries and of prompt tokens that wait in a queue."""
        return len(self._queue_of(model).waiting), self._queue_of(model).tokens

    def push(self, entry: Entry, now_s: float, *, bounded: bool = True) -> None:
        """Adds an entry after its equals. An empty queue has room for an entry of any size.

        Args:
            entry: the entry.
            now_s: time of a steady clock.
            bounded: False for work that was accepted before and returns.

        Raises:
            RouterError: QUEUE_FULL.
        """
        queue = self._queue_of(entry.model)
        depth = len(queue.waiting)
        full = depth >= self._max_entries or queue.tokens + entry.tokens > self._max_tokens
        if bounded and full and depth > 0:
            raise errors.queue_full(depth, self.retry_after_s(entry.model, now_s))
        self._tickets += 1
        queue.add(_Place(entry.order, self._tickets, now_s), entry)

    def heads(self) -> list[Entry]:
        """The next entry of each queue."""
        return [queue.waiting[0][1] for queue in self._queues.values() if queue.waiting]

    def take(self, entry: Entry, now_s: float) -> float:
        """Removes an entry that is dispatched now; returns the time of its wait, seconds."""
        place = self.remove(entry, now_s)
        waited_s = now_s - place.pushed_s if place is not None else 0.0
        if waited_s > AT_ONCE_S:
            self._queue_of(entry.model).drained(entry.tokens)
        return waited_s

    def remove(self, entry: Entry, now_s: float) -> _Place | None:
        """Removes an entry if it is there; returns its former place."""
        return self._queue_of(entry.model).remove(entry, now_s)

    def wait_s(self, model: str, now_s: float) -> float | None:
        """Time in which a model's queue drains, seconds; None while no rate is known."""
        return self._queue_of(model).wait_s(now_s)

    def waits_s(self, now_s: float) -> dict[str, float]:
        """`wait_s` of every queue with a known rate."""
        waits = {name: queue.wait_s(now_s) for name, queue in self._queues.items()}
        return {name: wait_s for name, wait_s in waits.items() if wait_s is not None}

    def retry_after_s(self, model: str, now_s: float) -> float:
        """Time after which a refused client may find room, seconds, by the measured drain rate."""
        wait_s = self.wait_s(model, now_s)
        if wait_s is None:
            return MAX_RETRY_AFTER_S
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, wait_s))

    def _queue_of(self, name: str) -> _ModelQueue[Entry]:
        return self._queues.setdefault(name, _ModelQueue())
