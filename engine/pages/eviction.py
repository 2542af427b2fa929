"""The order in which pages of the prefix cache are evicted when pages run out."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Orders the pages that only the cache holds.

    A page is found through all earlier pages of its sequence. So it must not be evicted before the
    later ones, which would take up room and never be found again. Pages of one sequence come tail
    first.
    """

    def used(self, page: int) -> None:
        """A request found the page in the cache."""
        ...

    def add(self, page: int) -> None:
        """A page became evictable."""
        ...

    def remove(self, page: int) -> None:
        """A page is in use again."""
        ...

    def pop(self) -> int:
        """Takes the page to evict next.

        Raises:
            KeyError: there is none.
        """
        ...

    def coldest(self) -> Iterator[int]:
        """The pages in the order in which `pop` would take them. Nothing may change meanwhile."""
        ...

    def evict(self, page: int) -> None:
        """Takes this page, although it may not be the first."""
        ...

    def demote(self, page: int) -> None:
        """A page is there again that was among the coldest. Its holder was no request."""
        ...

    def __len__(self) -> int: ...


class LruEviction:
    """Least recently used first."""

    def __init__(self) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()

    def used(self, page: int) -> None:
        """Does nothing, because only the next `add` counts."""

    def add(self, page: int) -> None:
        """Puts the page after all others."""
        self._pages[page] = None

    def remove(self, page: int) -> None:
        """Takes the page out."""
        del self._pages[page]

    def pop(self) -> int:
        """Takes the page that has waited longest."""
        return self._pages.popitem(last=False)[0]

    def coldest(self) -> Iterator[int]:
        """See `EvictionPolicy`."""
        return iter(self._pages)

    def evict(self, page: int) -> None:
        """Takes the page out."""
        del self._pages[page]

    def demote(self, page: int) -> None:
        """Puts the page before all others."""
        self._pages.move_to_end(page, last=False)

    def __len__(self) -> int:
        return len(self._pages)


class LfuEviction:
    """Least often used first, ties by age. It is a heap with lazy deletion."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, int]] = {}
        """Page -> uses, and when it was added."""
        self._heap: list[tuple[int, int, int]] = []
        self._uses: Counter[int] = Counter()
        self._clock = 0

    def used(self, page: int) -> None:
        """Counts a use, also while another request holds the page."""
        self._uses[page] += 1

    def add(self, page: int) -> None:
        """Queues the page by its uses."""
        self._clock += 1
        entry = self._uses[page], self._clock
        self._entries[page] = entry
        heapq.heappush(self._heap, (*entry, page))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [(*entry, page) for page, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def remove(self, page: int) -> None:
        """Takes the page out. Its heap entry is skipped later."""
        del self._entries[page]

    def pop(self) -> int:
        """Takes the page with the fewest uses."""
        while self._heap:
            uses, clock, page = heapq.heappop(self._heap)
            if self._entries.get(page) == (uses, clock):
                self.evict(page)
                return page
        raise KeyError("no evictable page")

    def coldest(self) -> Iterator[int]:
        """Walks the heap from its root, so that the first few cost little."""
        frontier = [(self._heap[0], 0)] if self._heap else []
        while frontier:
            (uses, clock, page), place = heapq.heappop(frontier)
            if self._entries.get(page) == (uses, clock):
                yield page
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child], child))

    def demote(self, page: int) -> None:
        """Does nothing, because uses count."""

    def evict(self, page: int) -> None:
        """Takes the page out. Its heap entry is skipped later."""
        del self._entries[page], self._uses[page]

    def __len__(self) -> int:
        return len(self._entries)


EVICTION_POLICIES: dict[str, type[LruEviction | LfuEviction]] = {
    "lru": LruEviction,
    "lfu": LfuEviction,
}
