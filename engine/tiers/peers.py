"""Pages that come from other workers, and pages that other workers get from here.

A fetch, at the worker that lacks pages:

    a prompt's keys are missing, and its request names a holder -> pages are held, the owner is
    asked -> COMING: the request waits as it does for a lower tier, others go on
    COMING -> `fetched`: the pages that have landed are cached under their keys, and the request
    computes the rest. No page is left: gone
    `fetched` -> QUARANTINED: a write may still land in the rest -> `freed`: gone

At the worker that holds them:

    `hold` -> BROUGHT: those of the leading keys that are in host slots are loaded into the pool.
    Nothing is loaded where there is no room, or while loads are late
    BROUGHT -> HELD: the owner is told of the leading keys that are in the pool now, and keeps them
    HELD -> `let_go`, once nothing reads them any more: gone

A page is given from the pool alone: between GPUs that is many times faster than from host memory,
and its own worker often wants it there next.

Fetches and holds may each have an eighth of the pool. What does not fit is computed, or not given.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.pages.blocks import BlockManager
from engine.tiers.protocol import PageTiers, Wait
from engine.types import PageIds, Request

PEER: Final = "peer"
"""Where the pages came from, as the name of a tier."""
MOST_SHARE: Final = 8
"""Part of the pool, an eighth: pages that come from peers, and pages that are held for them."""
FETCH_ID_BYTES: Final = 16
"""As those of transfers: drawn numbers never meet."""


class FetchWanted(NamedTuple):
    """A fetch that the owner is to make."""

    id: bytes
    """Random. It names the transfer, too."""
    request_id: bytes
    peer: str
    """Agent name of the worker that is said to hold the pages."""
    keys: Sequence[bytes]
    pages: PageIds
    """Where the page of each key goes."""


AskPeer = Callable[[FetchWanted], None]
"""Makes a fetch. Called on the step loop's thread; must return at once and answer by `fetched`."""


@dataclass(eq=False, slots=True)
class _Fetch:
    keys: list[bytes]
    first: int
    """Index of the first key in the prompt."""
    pages: PageIds
    """Pages that a write may still land in."""
    waits: list[Wait] = field(default_factory=list)
    coming: bool = True


ReportHeld = Callable[[PageIds, int], None]
"""Told which pages are held, and how many of them had to come into the pool for that. Called on the
step loop's thread; must return at once."""


class _Brought(NamedTuple):
    """A hold whose pages are on their way into the pool."""

    keys: Sequence[bytes]
    wait: Wait
    tell: ReportHeld


class Fetches:
    """See the module. It belongs to the step loop's thread.

    Args:
        blocks: the pool's pages.
        tiers: the tiers below the pool.
    """

    def __init__(self, blocks: BlockManager, tiers: PageTiers) -> None:
        self._blocks = blocks
        self._tiers = tiers
        self._ask: AskPeer | None = None
        self._fetches: dict[bytes, _Fetch] = {}
        self._coming: dict[bytes, _Fetch] = {}
        """By key."""
        self._pinned: dict[Wait, PageIds] = {}
        """Pages that a request will find in the pool, while it waits for others."""
        self._brought: dict[bytes, _Brought] = {}
        self._holds: dict[bytes, PageIds] = {}

    @property
    def on(self) -> bool:
        """Whether there is somebody who makes fetches."""
        return self._ask is not None

    @property
    def coming_pages(self) -> int:
        """Pages that a peer may write."""
        return sum(len(fetch.pages) for fetch in self._fetches.values() if fetch.coming)

    @property
    def quarantined_pages(self) -> int:
        """Pages that nobody waits for, but a write may still land in them."""
        return sum(len(fetch.pages) for fetch in self._fetches.values() if not fetch.coming)

    def fetch_by(self, ask: AskPeer) -> None:
        """Sets who makes fetches."""
        self._ask = ask

    def begin(self, wait: Wait, request: Request, keys: Sequence[bytes], room: int) -> None:
        """Begins to fetch what the worker lacks of a prompt, if the request says where it is.

        Args:
            wait: what the request waits for already. The fetch is added.
            request: the request.
            keys: the keys of the prompt's pages.
            room: pages that may be taken.
        """
        if self._ask is None or request.fetch is None:
            return
        keys = keys[: request.fetch.pages]
        found, joined, first, end = self._walk(keys)
        pages = np.array(found, np.int32)
        most = self._blocks.total // MOST_SHARE - self.coming_pages - self.quarantined_pages
        idle = self._blocks.count_idle(found)
        count = min(end - first, most, room - idle)
        if count <= 0 and not joined:
            return
        self._blocks.pin(pages)
        self._pinned[wait] = pages
        for fetch in joined:
            self._join(wait, fetch)
        if count > 0:
            self._join(wait, self._fetch(request, keys[first : first + count], first))

    @staticmethod
    def expected_pages(wait: Wait) -> int:
        """Leading pages of a prompt that are here when all fetches that it waits for have brought
        what they ask for."""
        fetches = (one for one in wait.under_way if isinstance(one, _Fetch))
        return max((fetch.first + len(fetch.keys) for fetch in fetches), default=0)

    def fetched(self, fetch_id: bytes, landed: int) -> None:
        """Nobody waits for the fetch any more: its first `landed` pages are there."""
        fetch = self._fetches.get(fetch_id)
        if fetch is None or not fetch.coming:
            return
        fetch.coming = False
        for key in fetch.keys:
            del self._coming[key]
        good, fetch.pages = fetch.pages[:landed], fetch.pages[landed:]
        depths = range(fetch.first, fetch.first + len(good))
        self._blocks.arrivals.note(good)
        self._blocks.adopt(good.tolist(), fetch.keys[: len(good)], depths)
        self._blocks.release(good)
        for wait in fetch.waits:
            wait.loaded_pages[PEER] += len(good)
            self._end(wait, fetch)
        if not len(fetch.pages):
            del self._fetches[fetch_id]

    def freed(self, fetch_id: bytes) -> None:
        """Nothing can land any more in the pages of a fetch that has ended."""
        fetch = self._fetches.get(fetch_id)
        if fetch is not None and not fetch.coming:
            del self._fetches[fetch_id]
            self._blocks.release(fetch.pages)

    def hold(self, hold_id: bytes, keys: Sequence[bytes], room: int, tell: ReportHeld) -> None:
        """Holds the leading keys that are here, for a peer, once they are in the pool.

        Args:
            hold_id: names it from now on.
            keys: the keys that the peer wants.
            room: pages that may be taken, be it from those that could be evicted. What does not fit
                is not given: running sequences would be preempted for it.
            tell: told of the pages, now or at a later turn; there may be none.
        """
        assert hold_id not in self._holds
        assert hold_id not in self._brought
        most = self._blocks.total // MOST_SHARE - sum(map(len, self._holds.values()))
        most -= sum(len(brought.keys) for brought in self._brought.values())
        keys = self._fitting(keys[: max(0, most)], room)
        self._brought[hold_id] = _Brought(keys, self._tiers.bring(keys, room), tell)
        self.turn()

    def turn(self) -> None:
        """Tells of the holds whose pages have come."""
        for hold_id in [one for one, brought in self._brought.items() if brought.wait.is_over]:
            brought = self._brought.pop(hold_id)
            pages = self._leading(brought.keys)
            self._blocks.pin(pages)
            if len(pages):
                self._holds[hold_id] = pages
            brought.tell(pages, brought.wait.coming_pages)

    def let_go(self, hold_id: bytes) -> None:
        """Nothing reads the pages of a hold any more."""
        self._brought.pop(hold_id, None)
        pages = self._holds.pop(hold_id, None)
        if pages is not None:
            self._blocks.release(pages)

    def add_holders(self, holders: NDArray[np.int32]) -> None:
        """Adds the pages that are held here to `holders` ([num_pages])."""
        groups = [fetch.pages for fetch in self._fetches.values()]
        groups += [*self._pinned.values(), *self._holds.values()]
        for pages in groups:
            np.add.at(holders, pages, 1)

    def _fitting(self, keys: Sequence[bytes], room: int) -> Sequence[bytes]:
        """The leading keys whose pages take no more than `room` pages, loads included."""
        found = [page for key in keys if (page := self._blocks.page_of(key)) is not None]
        taken = len(keys) - len(found) + self._blocks.count_idle(found)
        return keys if taken <= room else keys[: max(0, room)]

    def _leading(self, keys: Sequence[bytes]) -> PageIds:
        """The pages of the leading keys that are in the pool."""
        leading = keys[: self._blocks.count_cached(keys)]
        pages = [page for key in leading if (page := self._blocks.page_of(key)) is not None]
        return np.array(pages, np.int32)

    def _walk(self, keys: Sequence[bytes]) -> tuple[list[int], list[_Fetch], int, int]:
        """Pages of the leading keys that are in the pool, fetches that bring others of them, the
        index of the first key that is neither here nor on its way, and the end of what to fetch.

        A fetch may have ended without its pages while another one brings what lies behind them. So
        the end is where such keys begin.
        """
        found: list[int] = []
        joined: dict[int, _Fetch] = {}
        for index, key in enumerate(keys):
            if (page := self._blocks.page_of(key)) is not None:
                found.append(page)
            elif (fetch := self._coming.get(key)) is not None:
                joined[id(fetch)] = fetch
            elif not self._tiers.is_coming(key):
                coming = (at for at in range(index, len(keys)) if keys[at] in self._coming)
                return found, list(joined.values()), index, next(coming, len(keys))
        return found, list(joined.values()), len(keys), len(keys)

    def _fetch(self, request: Request, keys: Sequence[bytes], first: int) -> _Fetch:
        assert self._ask is not None
        assert request.fetch is not None
        fetch_id = secrets.token_bytes(FETCH_ID_BYTES)
        fetch = _Fetch(list(keys), first, self._blocks.allocate(len(keys)))
        self._fetches[fetch_id] = fetch
        self._coming.update(dict.fromkeys(fetch.keys, fetch))
        wanted = FetchWanted(fetch_id, request.id, request.fetch.peer, fetch.keys, fetch.pages)
        self._ask(wanted)
        return fetch

    @staticmethod
    def _join(wait: Wait, fetch: _Fetch) -> None:
        wait.under_way.add(fetch)
        fetch.waits.append(wait)

    def _end(self, wait: Wait, fetch: _Fetch) -> None:
        wait.under_way.discard(fetch)
        if not any(isinstance(other, _Fetch) for other in wait.under_way):
            self._blocks.release(self._pinned.pop(wait))
        self._tiers.fetched(wait)
