"""Who hears of pages: of those that become free or are allocated, and of those of the cache."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.types import PageIds


class CacheEventKind(enum.StrEnum):
    """The kind of an event of a cached page."""

    STORED = "stored"
    HIT = "hit"
    EVICTED = "evicted"


class CacheEvent(NamedTuple):
    """One event of the prefix cache; `sequence` counts them without gaps from 1."""

    sequence: int
    kind: CacheEventKind
    key: bytes
    page: int


class CacheEvents(NamedTuple):
    """Events of one kind, in order."""

    first: int
    """Sequence of the first."""
    kind: CacheEventKind
    keys: Sequence[bytes]
    pages: Sequence[int]

    def each(self) -> Iterator[CacheEvent]:
        """One after the other."""
        for number, (key, page) in enumerate(zip(self.keys, self.pages, strict=True), self.first):
            yield CacheEvent(number, self.kind, key, page)


class PageWatch(Protocol):
    """Hears of pages that become free and of free pages that are allocated."""

    damaged: int
    """Pages found written while they were free. Must stay 0."""

    def freed(self, pages: PageIds) -> None:
        """The pages are FREE from now on."""
        return

    def allocated(self, pages: PageIds) -> None:
        """FREE pages are about to be HELD."""
        return

    def idle(self, is_free: NDArray[np.bool_]) -> None:
        """There is time to check FREE pages. `is_free` has an entry for every page of the pool."""
        return


class Unwatched(PageWatch):
    """Checks nothing."""

    damaged = 0
