"""Two small tables that both state machines keep: what is over, and what is due."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

Clock = Callable[[], float]
"""Monotonic seconds."""


class BoundedMemory(Generic[K, V]):
    """Remembers a key at least until it is `age_s` old or `entries` others came after it.

    Two generations, the young one for new keys: when it is full or old, the other is dropped whole
    and it takes its place. So an entry needs no time and no order of its own: 90 bytes for an id,
    nothing for the garbage collector to walk, and never more than `2 * entries` of them.

    Forgetting is safe only once nobody can still ask, so both bounds are chosen far above the
    longest life of a request.
    """

    def __init__(self, entries: int, age_s: float, clock: Clock) -> None:
        self._entries = entries
        self._age_s = age_s
        self._clock = clock
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}
        self._began_s = clock()
        """When the young generation did."""

    def add(self, key: K, value: V) -> None:
        """Remembers a key from now on, with a new value where it is known."""
        self._turn()
        self._young[key] = value

    def get(self, key: K) -> V | None:
        """The value of a key, or None where it is not remembered."""
        self._turn()
        return self._young[key] if key in self._young else self._old.get(key)

    def __contains__(self, key: K) -> bool:
        self._turn()
        return key in self._young or key in self._old

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def _turn(self) -> None:
        """Begins a generation where it is time."""
        now_s = self._clock()
        age_s = now_s - self._began_s
        if len(self._young) < self._entries and age_s < self._age_s:
            return
        # None was added to the young one after it was `age_s` old.
        self._old = self._young if age_s < 2 * self._age_s else {}
        self._young, self._began_s = {}, now_s


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
