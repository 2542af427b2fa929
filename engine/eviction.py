"""Which page of the prefix cache goes first when pages run out."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the pages that only the cache holds."""

    def add(self, page: int, depth: int) -> None:
        """A page became evictable. `depth` is its index within its sequence."""
        ...

    def remove(self, page: int) -> None:
        """A page is in use again."""
        ...

    def pop(self) -> int:
        """Takes the page to evict next. Raises KeyError where there is none."""
        ...

    def __len__(self) -> int: ...


class LruEviction:
    """Least recently used first. Pages of one sequence are added tail first, so they go tail
    first, and a cached prefix never loses its beginning before its end."""

    def __init__(self) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()

    def add(self, page: int, depth: int) -> None:
        """Puts the page behind all others."""
        self._pages[page] = None

    def remove(self, page: int) -> None:
        """Takes the page out."""
        del self._pages[page]

    def pop(self) -> int:
        """Takes the page that has waited longest."""
        return self._pages.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._pages)


class _ScoredEviction:
    """Lowest score first, ties by age; a heap with lazy deletion."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._uses: dict[int, int] = {}
        self._clock = 0

    def _score(self, page: int, depth: int) -> float:
        raise NotImplementedError

    def add(self, page: int, depth: int) -> None:
        """Scores the page and queues it."""
        self._clock += 1
        self._uses[page] = self._uses.get(page, 0) + 1
        score = self._score(page, depth)
        self._entries[page] = (score, self._clock)
        heapq.heappush(self._heap, (score, self._clock, page))

    def remove(self, page: int) -> None:
        """Takes the page out; its heap entry is skipped when met."""
        del self._entries[page]

    def pop(self) -> int:
        """Takes the page with the lowest score."""
        while self._heap:
            score, clock, page = heapq.heappop(self._heap)
            if self._entries.get(page) == (score, clock):
                del self._entries[page]
                del self._uses[page]
                return page
        raise KeyError("no evictable page")

    def __len__(self) -> int:
        return len(self._entries)


class LfuEviction(_ScoredEviction):
    """Least often used first, ties by age."""

    def _score(self, page: int, depth: int) -> float:
        return float(self._uses[page])


class CostEviction(_ScoredEviction):
    """Cheapest to compute again, per use, first: a page deep in a sequence costs attention over
    all before it, so it is worth more than a shallow one used as often (GreedyDual-Size-Frequency,
    Cherkasova 1998, with the number of pages before it as the cost and an ageing floor)."""

    def __init__(self) -> None:
        super().__init__()
        self._floor = 0.0

    def _score(self, page: int, depth: int) -> float:
        return self._floor + self._uses[page] * (1.0 + 0.01 * depth)

    def pop(self) -> int:
        """Takes the cheapest page and lifts the floor to its score, so that old riches age."""
        if self._heap:
            self._floor = self._heap[0][0]
        return super().pop()


EVICTION_POLICIES: dict[str, type[LruEviction | LfuEviction | CostEviction]] = {
    "lru": LruEviction,
    "lfu": LfuEviction,
    "cost": CostEviction,
}
