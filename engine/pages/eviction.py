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

    def add(self, page: int, depth: int) -> None:
        """A page became evictable. `depth` is its index within its sequence."""
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

    def add(self, page: int, depth: int) -> None:
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


class _ScoredEviction:
    """Lowest score first, ties by age. It is a heap with lazy deletion."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._uses: Counter[int] = Counter()
        self._clock = 0
        self._floor = 0.0
        """Score of the page evicted last."""

    def _score(self, page: int, depth: int) -> float:
        raise NotImplementedError

    def used(self, page: int) -> None:
        """Counts a use, also while another request holds the page."""
        self._uses[page] += 1

    def add(self, page: int, depth: int) -> None:
        """Scores the page and queues it."""
        self._clock += 1
        score = self._score(page, depth)
        self._entries[page] = (score, self._clock)
        heapq.heappush(self._heap, (score, self._clock, page))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [(*entry, page) for page, entry in self._entries.items()]
            heapq.heapify(self._heap)

    def remove(self, page: int) -> None:
        """Takes the page out. Its heap entry is skipped later."""
        del self._entries[page]

    def pop(self) -> int:
        """Takes the page with the lowest score."""
        while self._heap:
            score, clock, page = heapq.heappop(self._heap)
            if self._entries.get(page) == (score, clock):
                self._floor = score
                del self._entries[page], self._uses[page]
                return page
        raise KeyError("no evictable page")

    def coldest(self) -> Iterator[int]:
        """Walks the heap from its root, so that the first few cost little."""
        frontier = [(self._heap[0], 0)] if self._heap else []
        while frontier:
            (score, clock, page), place = heapq.heappop(frontier)
            if self._entries.get(page) == (score, clock):
                yield page
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child], child))

    def demote(self, page: int) -> None:
        """Does nothing, because the score counts uses."""

    def evict(self, page: int) -> None:
        """Takes the page out. Its heap entry is skipped later."""
        score, _ = self._entries.pop(page)
        self._floor = max(self._floor, score)
        del self._uses[page]

    def __len__(self) -> int:
        return len(self._entries)


class LfuEviction(_ScoredEviction):
    """Least often used first, ties by age."""

    def _score(self, page: int, depth: int) -> float:
        return float(self._uses[page])


class CostEviction(_ScoredEviction):
    """The page with the least cost to compute again, per use, goes first. Scores add a floor that
    rises with every eviction, so that formerly valuable pages grow old (GreedyDual-Size-Frequency,
    Cherkasova 1998).

    The cost of a page is its own tokens and attention over all tokens before it. A lost page makes
    the later ones useless, so it is worth at least as much as the next one released with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._behind = (-1, 0.0)
        """Depth and score of the page added last."""

    def _score(self, page: int, depth: int) -> float:
        score = self._floor + (1 + self._uses[page]) * (1.0 + 0.01 * depth)
        last_depth, last_score = self._behind
        if depth == last_depth - 1:
            score = max(score, last_score)
        self._behind = (depth, score)
        return score


EVICTION_POLICIES: dict[str, type[LruEviction | LfuEviction | CostEviction]] = {
    "lru": LruEviction,
    "lfu": LfuEviction,
    "cost": CostEviction,
}
