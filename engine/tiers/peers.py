"""Fetches of cached pages between two workers, from the step loop's side of each.

The *fetcher* lacks pages of a prompt, and the request names a *holder* that has them. The worker
process (its `fetch_service`) talks to the other worker; this module allocates, waits and caches.

States of a fetch, at the fetcher:

    COMING        Pages are allocated for the missing ones; cached pages may be evicted for that.
                  The process is asked to fetch them. The request waits; other requests run.
    (fetched)     The process reports which pages have landed. They enter the cache, and the request
                  computes the rest. If every page has landed, the fetch is over.
    QUARANTINED   If pages are missing at the end, the holder may still write into them. They are
                  not used until the process calls `freed`.

States of a hold, at the holder:

    BROUGHT       The process asks for pages by key. Those in host memory are loaded into the pool
                  first, unless there is no room or recent loads were late.
    HELD          The process gets the leading pages that are in the pool now. They are not evicted.
    (let go)      The process calls `let_go` when no transfer reads them any more.

Pages are sent from the pool only, never from host memory: between GPUs that is many times faster,
and the holder often needs them in its pool soon as well.

Models with several groups of layers can resume a prompt only at a *resume point*, where every group
has the pages it needs. A fetch brings the whole resume point: the missing pages of group 0 up to
it, and the pages that each other group needs there. The holder gives all of them or none. If the
fetch breaks off, the landed pages of group 0 are cached. The usual cache look-up then decides
where the prompt resumes.

All fetches together may have an eighth of a group's pages, and so may all holds. Where a model has
several groups, a lone fetch or hold may have more of groups 1, 2, ... With one group, a fetch or
hold that does not fit is shortened. With several, such a fetch is not made, and its prompt is
computed; such a hold is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.groups.others import OtherGroups
from engine.pages.blocks import BlockManager
from engine.tiers.protocol import PageTiers, Wait
from engine.types import PageIds, Request

PEER: Final = "peer"
"""Where the pages came from, as the name of a tier."""
MOST_SHARE: Final = 8
"""A divisor. All fetches may have this part of a group's pages, an eighth, and so may all holds. A
lone fetch or hold of group 1, 2, ... may exceed it."""
FETCH_ID_BYTES: Final = 16
"""As for transfers. Random ids do not collide."""


class GroupFetch(NamedTuple):
    """What a fetch brings of one group."""

    keys: Sequence[bytes]
    pages: PageIds
    """Where the page of each key goes."""


class FetchWanted(NamedTuple):
    """A fetch that the worker process is to make."""

    id: bytes
    """Random. It names the transfer, too."""
    request_id: bytes
    peer: str
    """Agent name of the worker that is said to hold the pages."""
    parts: Sequence[GroupFetch]
    """By group."""


AskPeer = Callable[[FetchWanted], None]
"""Makes a fetch. Called on the step loop's thread; must return at once and answer by `fetched`."""


class _GroupRun(NamedTuple):
    """Pages of one group that a fetch brings."""

    keys: list[bytes]
    depths: list[int]
    """Index of each in the prompt."""
    pages: PageIds


@dataclass(eq=False, slots=True)
class _Fetch:
    parts: list[_GroupRun]
    """By group."""
    left: list[PageIds] = field(default_factory=list)
    """By group, pages that a write may still land in after the end."""
    waits: list[Wait] = field(default_factory=list)
    coming: bool = True

    @property
    def pages(self) -> list[PageIds]:
        """By group, pages that a write may still land in."""
        return [part.pages for part in self.parts] if self.coming else self.left


ReportHeld = Callable[[Sequence[PageIds], int], None]
"""Takes the pages of each group that are held, and how many of them had to come into the pool.
Called on the step loop's thread; must return at once."""


class _Brought(NamedTuple):
    """A hold whose pages are on their way into the pool."""

    keys: Sequence[Sequence[bytes]]
    wait: Wait
    report: ReportHeld


class _Found(NamedTuple):
    """Where pages of a prompt are, of one group."""

    here: list[int]
    """Pages in the pool."""
    joined: list[_Fetch]
    """Fetches that bring others."""
    missing: list[int]
    """Indices in the prompt of those that are neither here nor on their way."""


class Fetches:
    """See the module. It belongs to the step loop's thread.

    Args:
        blocks: the pool's pages, of group 0.
        tiers: the tiers below the pool.
        others: groups 1, 2, ...
    """

    def __init__(self, blocks: BlockManager, tiers: PageTiers, others: OtherGroups) -> None:
        self._books = [blocks, *(group.blocks for group in others.groups)]
        self._others = others
        self._tiers = tiers
        self._ask: AskPeer | None = None
        self._fetches: dict[bytes, _Fetch] = {}
        self._coming: list[dict[bytes, _Fetch]] = [{} for _ in self._books]
        """By group and key."""
        self._pinned: dict[Wait, list[PageIds]] = {}
        """By group, pages that a request will find in the pool, while it waits for others."""
        self._brought: dict[bytes, _Brought] = {}
        self._holds: dict[bytes, list[PageIds]] = {}
        others.count_lent(self.count_held)

    @property
    def on(self) -> bool:
        """Whether there is somebody who makes fetches."""
        return self._ask is not None

    @property
    def coming_pages(self) -> int:
        """Pages of group 0 that a peer may write."""
        return self._count_fetched(0, coming=True)

    @property
    def quarantined_pages(self) -> int:
        """Pages of group 0 that nobody waits for, but a write may still land in them."""
        return self._count_fetched(0, coming=False)

    def count_held(self, group: int) -> int:
        """Pages of a group that are held here."""
        return sum(map(len, self._held(group)))

    def fetch_by(self, ask: AskPeer) -> None:
        """Sets who makes fetches."""
        self._ask = ask

    def begin(
        self, wait: Wait, request: Request, keys: Sequence[bytes], rooms: Sequence[int]
    ) -> None:
        """Begins to fetch what the worker lacks of a prompt, if the request says where it is.

        Args:
            wait: what the request waits for already. The fetch is added.
            request: the request.
            keys: the keys of the prompt's pages.
            rooms: by group, pages that may be taken.
        """
        if self._ask is None or request.fetch is None:
            return
        end = min(request.fetch.pages, len(keys))
        if self._others and self._others.resumable(keys, self._books[0].count_cached(keys)) >= end:
            return
        begins = [0, *self._others.begins(end)]
        found = [self._find(group, keys, first, end) for group, first in enumerate(begins)]
        missing = [
            self._bounded(group, one, room)
            for group, (one, room) in enumerate(zip(found, rooms, strict=True))
        ]
        bounded = map(_is_shorter, missing, (one.missing for one in found))
        if self._others and any(bounded):
            return
        joined = {id(fetch): fetch for one in found for fetch in one.joined}
        if not any(missing) and not joined:
            return
        pinned = [np.array(one.here, np.int32) for one in found]
        for books, pages in zip(self._books, pinned, strict=True):
            books.pin(pages)
        self._pinned[wait] = pinned
        for fetch in joined.values():
            self._join(wait, fetch)
        if any(missing):
            self._join(wait, self._fetch(request, keys, missing))

    @staticmethod
    def expected_pages(wait: Wait) -> int:
        """Leading pages of a prompt that are here when all fetches that it waits for have brought
        what they ask for."""
        fetches = [one for one in wait.under_way if isinstance(one, _Fetch)]
        ends = [part.depths[-1] + 1 for one in fetches for part in one.parts if part.depths]
        return max(ends, default=0)

    def fetched(self, fetch_id: bytes, landed: int, *, others: bool = False) -> None:
        """Nobody waits for the fetch any more: its first `landed` pages of group 0 are there, and
        all those of the `others` or none that may be used."""
        fetch = self._fetches.get(fetch_id)
        if fetch is None or not fetch.coming:
            return
        counts = [landed, *(len(part.keys) * others for part in fetch.parts[1:])]
        fetch.left = [part.pages[n:] for part, n in zip(fetch.parts, counts, strict=True)]
        fetch.coming = False
        for group, (part, count) in enumerate(zip(fetch.parts, counts, strict=True)):
            for key in part.keys:
                del self._coming[group][key]
            books, good = self._books[group], part.pages[:count]
            books.arrivals.note(good)
            books.adopt(good.tolist(), part.keys[:count])
            books.release(good)
        for wait in fetch.waits:
            wait.loaded_pages[PEER] += landed
            self._end(wait, fetch)
        if not any(map(len, fetch.left)):
            del self._fetches[fetch_id]

    def freed(self, fetch_id: bytes) -> None:
        """Nothing can land any more in the pages of a fetch that has ended."""
        fetch = self._fetches.get(fetch_id)
        if fetch is not None and not fetch.coming:
            del self._fetches[fetch_id]
            for books, pages in zip(self._books, fetch.left, strict=True):
                books.release(pages)

    def hold(
        self,
        hold_id: bytes,
        keys: Sequence[Sequence[bytes]],
        rooms: Sequence[int],
        report: ReportHeld,
    ) -> None:
        """Holds the leading keys that are here, for a peer, once they are in the pool. Of several
        groups it holds all keys or none.

        Args:
            hold_id: names it from now on.
            keys: by group, the keys that the peer wants.
            rooms: by group, pages that may be taken, be it from those that could be evicted. What
                does not fit is not given: running sequences would be preempted for it.
            report: called with the pages, now or at a later turn; there may be none.
        """
        assert hold_id not in self._holds
        assert hold_id not in self._brought
        fitting = [
            self._fitting(group, own, room)
            for group, (own, room) in enumerate(zip(keys, rooms, strict=True))
        ]
        if len(keys) > 1 and any(map(_is_shorter, fitting, keys)):
            fitting = [() for _ in keys]
        self._brought[hold_id] = _Brought(fitting, self._tiers.bring(fitting, rooms), report)
        self.turn()

    def turn(self) -> None:
        """Reports the holds whose pages have come."""
        for hold_id in [one for one, brought in self._brought.items() if brought.wait.is_over]:
            brought = self._brought.pop(hold_id)
            pages = [_leading(*one) for one in zip(self._books, brought.keys, strict=True)]
            if len(pages) > 1 and any(map(_is_shorter, pages, brought.keys)):
                pages = [own[:0] for own in pages]
            for books, own in zip(self._books, pages, strict=True):
                books.pin(own)
            if any(map(len, pages)):
                self._holds[hold_id] = pages
            brought.report(pages, brought.wait.coming_pages)

    def let_go(self, hold_id: bytes) -> None:
        """Nothing reads the pages of a hold any more."""
        self._brought.pop(hold_id, None)
        for books, pages in zip(self._books, self._holds.pop(hold_id, ()), strict=False):
            books.release(pages)

    def add_holders(self, holders: NDArray[np.int32], group: int = 0) -> None:
        """Adds the pages of a group that are held here to `holders` ([num_pages])."""
        for pages in self._held(group):
            np.add.at(holders, pages, 1)

    def _held(self, group: int) -> list[PageIds]:
        held = [fetch.pages for fetch in self._fetches.values()]
        held += [*self._pinned.values(), *self._holds.values()]
        return [pages[group] for pages in held]

    def _count_fetched(self, group: int, *, coming: bool) -> int:
        return sum(len(one.pages[group]) for one in self._fetches.values() if one.coming is coming)

    def _find(self, group: int, keys: Sequence[bytes], first: int, end: int) -> _Found:
        """Where pages [first, end) of a prompt are."""
        books, coming = self._books[group], self._coming[group]
        here, joined, missing = list[int](), dict[int, _Fetch](), list[int]()
        for index in range(first, end):
            key = keys[index]
            if (page := books.page_of(key)) is not None:
                here.append(page)
            elif (fetch := coming.get(key)) is not None:
                joined[id(fetch)] = fetch
            elif not self._tiers.is_coming(key, group):
                missing.append(index)
        return _Found(here, list(joined.values()), missing)

    def _bounded(self, group: int, found: _Found, room: int) -> list[int]:
        """The missing pages that may come."""
        books = self._books[group]
        taken = sum(self._count_fetched(group, coming=coming) for coming in (True, False))
        most = books.total // MOST_SHARE - taken
        if group and not taken:
            most = books.total
        count = min(len(found.missing), most, room - books.count_idle(found.here))
        return found.missing[: max(0, count)]

    def _fitting(self, group: int, keys: Sequence[bytes], room: int) -> Sequence[bytes]:
        """The leading keys whose pages take no more than may be held for peers, and no more than
        `room` pages, loads included."""
        books = self._books[group]
        taken = sum(len(pages[group]) for pages in self._holds.values())
        taken += sum(len(brought.keys[group]) for brought in self._brought.values())
        if not group or taken:
            keys = keys[: max(0, books.total // MOST_SHARE - taken)]
        found = [page for key in keys if (page := books.page_of(key)) is not None]
        needed = len(keys) - len(found) + books.count_idle(found)
        return keys if needed <= room else keys[: max(0, room)]

    def _fetch(
        self, request: Request, keys: Sequence[bytes], missing: Sequence[list[int]]
    ) -> _Fetch:
        assert self._ask is not None
        assert request.fetch is not None
        fetch_id = secrets.token_bytes(FETCH_ID_BYTES)
        parts = [
            _GroupRun([keys[at] for at in depths], depths, books.allocate(len(depths)))
            for books, depths in zip(self._books, missing, strict=True)
        ]
        fetch = self._fetches[fetch_id] = _Fetch(parts)
        for coming, part in zip(self._coming, parts, strict=True):
            coming.update(dict.fromkeys(part.keys, fetch))
        wanted = [GroupFetch(part.keys, part.pages) for part in parts]
        self._ask(FetchWanted(fetch_id, request.id, request.fetch.peer, wanted))
        return fetch

    @staticmethod
    def _join(wait: Wait, fetch: _Fetch) -> None:
        wait.under_way.add(fetch)
        fetch.waits.append(wait)

    def _end(self, wait: Wait, fetch: _Fetch) -> None:
        wait.under_way.discard(fetch)
        if not any(isinstance(other, _Fetch) for other in wait.under_way):
            for books, pages in zip(self._books, self._pinned.pop(wait), strict=True):
                books.release(pages)
        self._tiers.fetched(wait)


def _leading(books: BlockManager, keys: Sequence[bytes]) -> PageIds:
    """The pages of the leading keys that are in the pool."""
    leading = keys[: books.count_cached(keys)]
    pages = [page for key in leading if (page := books.page_of(key)) is not None]
    return np.array(pages, np.int32)


def _is_shorter(some: Sequence[object] | PageIds, wanted: Sequence[object]) -> bool:
    return len(some) < len(wanted)
