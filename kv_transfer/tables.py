"""Two small tables that both state machines keep: what is over, and what is due."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Clock = Callable[[], float]
"""Monotonic seconds."""


class BoundedMemory(Generic[K, V]):
    """Remembers the last `max_entries` keys for up to `max_age_s`; the oldest goes first.

    Forgetting is safe only once nobody can still ask, so both bounds are chosen far above the
    longest life of a request.
    """

    def __init__(self, max_entries: int, max_age_s: float, clock: Clock) -> None:
        self._max_entries = max_entries
        self._max_age_s = max_age_s
        self._clock = clock
        self._entries: OrderedDict[K, tuple[V, float]] = OrderedDict()

    def add(self, key: K, value: V) -> None:
        """Remembers a key from now on, with a new value where it is known."""
        self._entries.pop(key, None)
        self._entries[key] = (value, self._clock())
        self._forget()

    def get(self, key: K) -> V | None:
        """The value of a key, or None where it is not remembered."""
        self._forget()
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def __contains__(self, key: K) -> bool:
        self._forget()
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def _forget(self) -> None:
        oldest_s = self._clock() - self._max_age_s
        while self._entries:
            _, added_s = next(iter(self._entries.values()))
            if len(self._entries) <= self._max_entries and added_s >= oldest_s:
                return
            self._entries.popitem(last=False)


class Timers:
    """Keys to look at again, each at a time; setting one twice means two looks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, bytes]] = []

    def set(self, key: bytes, after_s: float) -> None:
        """Asks for a look at `key` in `after_s` seconds."""
        heapq.heappush(self._heap, (self._clock() + after_s, key))

    def pop_due(self) -> list[bytes]:
        """Keys whose time has come."""
        now_s = self._clock()
        due = []
        while self._heap and self._heap[0][0] <= now_s:
            due.append(heapq.heappop(self._heap)[1])
        return due

    def next_after_s(self) -> float | None:
        """Seconds until the next look, or None."""
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None
