"""The block manager keeps the holders of each page of the KV pool. It knows no tensors or requests.

Every page but the scratch page is in exactly one state:

    FREE      refcount 0, no key, no step in flight may write it: may be allocated
    SETTLING  refcount 0, but a launched step may still write it: free (or evictable) once settled
    EVICTABLE refcount 0, keyed: only the prefix cache holds it; allocated when FREE runs out
    HELD      refcount > 0

`free + evictable + settling + held == num_pages - 1`. A page with a key is complete, and no step
in flight writes it; `by_key[key] == page` iff `key_of[page] == key`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.pages import runs
from engine.pages.arrivals import Arrivals
from engine.pages.eviction import EvictionPolicy, LruEviction
from engine.pages.lending import Lending, Loan
from engine.pages.watch import CacheEventKind, CacheEvents, PageWatch, Unwatched
from engine.types import SCRATCH_PAGE, PageIds

AHEAD, AHEAD_SHARE = 8, 16
"""Bounds on the pages that are evicted ahead of time to make a run. The first is a multiple of the
run's pages. The second is a divisor of the pool."""


class OutOfPagesError(Exception):
    """Too few pages are free or evictable. Nothing was allocated."""


class BlockManager:
    """Reference-counted pages, the prefix cache's index, and the last-writer rule."""

    def __init__(
        self,
        num_pages: int,
        eviction: EvictionPolicy | None = None,
        watch: PageWatch | None = None,
    ) -> None:
        if num_pages < 2:
            raise ValueError("a pool has a scratch page and at least one more")
        self.num_pages = num_pages
        self._refcount = np.zeros(num_pages, np.int32)
        self._last_writer = np.full(num_pages, -1, np.int64)
        self._is_free = np.ones(num_pages, np.bool_)
        self._is_free[SCRATCH_PAGE] = False
        self._free = num_pages - 1
        self._settling: list[int] = []
        self._settled_step = -1
        self._key_of: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._evictable: EvictionPolicy = LruEviction() if eviction is None else eviction
        self._lending = Lending(self._evictable)
        self._below: Container[bytes] = ()
        self._listeners: dict[CacheEventKind, list[Callable[[CacheEvents], None]]] = {
            kind: [] for kind in CacheEventKind
        }
        self._event_sequence = 0
        self.arrivals = Arrivals(num_pages)
        self._watch: PageWatch = watch or Unwatched()

    @property
    def total(self) -> int:
        """Pages that can be allocated at all."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        """Pages in state FREE."""
        return self._free

    @property
    def evictable(self) -> int:
        """Pages in state EVICTABLE."""
        return len(self._evictable)

    @property
    def available(self) -> int:
        """Pages that `allocate` can give now."""
        return self._free + len(self._evictable)

    @property
    def settling(self) -> int:
        """Pages in state SETTLING."""
        return len(self._settling)

    @property
    def damaged(self) -> int:
        """Pages that were written while they were free, if that is checked."""
        return self._watch.damaged

    def subscribe(
        self,
        listener: Callable[[CacheEvents], None],
        kinds: Collection[CacheEventKind] = tuple(CacheEventKind),
    ) -> None:
        """Calls `listener` for all events of these kinds from now on, on the caller's thread."""
        for kind in kinds:
            self._listeners[kind].append(listener)

    # -- allocation ---------------------------------------------------------------------------

    def allocate(self, count: int) -> PageIds:
        """Takes `count` pages with reference count 1, for a prompt. They are one ascending run if a
        bounded number of early evictions makes that possible, else few runs.

        Pages that are neighbours on both sides of a hand-off are sent together. After a while the
        pool is full of cached pages. If only as many pages were evicted as are needed, there would
        be no choice among them, and the growth of sequences would break up all runs in time.

        Raises:
            OutOfPagesError: fewer are available.
        """
        self._check_available(count)
        most_free = count + min(AHEAD * count, self.total // AHEAD_SHARE)
        while (run := runs.fitting(self._is_free, count)) is None:
            evicted = min(-(-count // 4), most_free - self._free, self.evictable)
            if evicted <= 0:
                break
            self._evict(evicted)
        return self._take(
            run if run is not None else runs.scattered(self._is_free, count, longest=True)
        )

    def allocate_apart(self, count: int) -> PageIds:
        """Takes `count` pages with reference count 1 that may lie anywhere. They fill the gaps.

        Raises:
            OutOfPagesError: fewer are available.
        """
        if not count:  # The usual case for prompts needs no search.
            return np.empty(0, np.int32)
        self._check_available(count)
        self._evict(max(0, count - self._free))
        if count == self._free:  # The usual case of a full pool has no gaps to compare.
            return self._take(np.flatnonzero(self._is_free).astype(np.int32))
        return self._take(runs.scattered(self._is_free, count, longest=False))

    def _check_available(self, count: int) -> None:
        if count > self.available:
            raise OutOfPagesError(f"{count} pages wanted, {self.available} available")

    def _take(self, pages: PageIds) -> PageIds:
        self._watch.allocated(pages)
        self._is_free[pages] = False
        self._refcount[pages] = 1
        self._free -= len(pages)
        self.arrivals.given(pages)
        return pages

    def _evict(self, count: int) -> None:
        pages = self._lending.evict(count)
        self._unkey(pages)
        self._make_free(pages)

    def is_alone(self, page: int) -> bool:
        """Whether a held page has one holder and no key, so that the holder may write it again."""
        return bool(self._refcount[page] == 1) and page not in self._key_of

    def has_one_holder(self, page: int) -> bool:
        """Whether nobody beside one holder, and perhaps the cache, has the page."""
        return bool(self._refcount[page] == 1)

    def _unkey(self, pages: Iterable[int]) -> None:
        keys, unkeyed = list[bytes](), list[int]()
        for page in pages:
            key = self._key_of.pop(page, None)
            if key is not None:
                del self._by_key[key]
                self._lending.unkeyed(page)
                keys.append(key)
                unkeyed.append(page)
        self._emit(CacheEventKind.EVICTED, keys, unkeyed)

    def share(self, pages: PageIds) -> None:
        """Adds a holder to pages that are held already."""
        self._refcount[pages] += 1

    def release(self, pages: PageIds) -> None:
        """Removes a holder. Give the pages in sequence order, since the tail is evicted first."""
        self._refcount[pages] -= 1
        left = pages[self._refcount[pages] == 0][::-1]
        written = self._last_writer[left] > self._settled_step
        self._settling.extend(left[written].tolist())
        self._retire(left[~written].tolist())

    def _retire(self, pages: list[int]) -> None:
        unkeyed = []
        for page in pages:
            if page in self._key_of:
                self._evictable.add(page)
                self._lending.idle(page)
            else:
                unkeyed.append(page)
        self._make_free(unkeyed)

    def _make_free(self, pages: list[int]) -> None:
        freed = np.array(pages, np.int32)
        self._watch.freed(freed)
        self._is_free[freed] = True
        self._free += freed.size

    # -- the last-writer rule -----------------------------------------------------------------

    def mark_written(self, pages: PageIds, step: int) -> None:
        """Notes that step `step`, about to be launched, may write these pages."""
        self._last_writer[pages] = step

    def settle(self, step: int) -> None:
        """Notes that step `step` and all before it are done and write no pages any more."""
        self._settled_step = step
        if not self._settling:
            return
        settling = np.array(self._settling)
        written = self._last_writer[settling] > step
        self._settling = settling[written].tolist()
        self._retire(settling[~written].tolist())

    # -- the prefix cache ---------------------------------------------------------------------

    def count_cached(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys that are in the cache."""
        count = 0
        for key in keys:
            if key not in self._by_key:
                break
            count += 1
        return count

    def count_evictable(self, keys: Sequence[bytes]) -> int:
        """The number of leading cached pages that only the cache holds. Acquiring them leaves that
        many fewer available."""
        return self.count_idle([self._by_key[key] for key in keys[: self.count_cached(keys)]])

    def count_idle(self, pages: Sequence[int]) -> int:
        """The number of those pages that nobody holds."""
        return int((self._refcount[pages] == 0).sum()) if pages else 0

    def acquire(self, keys: Sequence[bytes]) -> PageIds:
        """Holds the pages of the leading keys that are cached, and returns them in order."""
        pages = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            if self._refcount[page] == 0:
                self._evictable.remove(page)
                self._lending.in_use(page)
            self._refcount[page] += 1
            self._evictable.used(page)
            pages.append(page)
        self._emit(CacheEventKind.HIT, keys[: len(pages)], pages)
        return np.array(pages, np.int32)

    def publish(self, pages: PageIds, keys: Sequence[bytes]) -> None:
        """Keys complete, settled, held pages.

        Pages that have a key already, and keys that have a page already, are left as they are.
        """
        assert (self._last_writer[pages] <= self._settled_step).all(), "page not settled"
        self.adopt(pages.tolist(), keys)

    def adopt(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Keys complete, held pages that may be of several sequences. See `publish`."""
        stored, keyed = list[bytes](), list[int]()
        for page, key in zip(pages, keys, strict=True):
            if page not in self._key_of and key not in self._by_key:
                self._key_of[page] = key
                self._by_key[key] = page
                if key in self._below:
                    self._lending.saved(page, idle=False)
                stored.append(key)
                keyed.append(page)
        self._emit(CacheEventKind.STORED, stored, keyed)

    def forget(self, pages: PageIds) -> None:
        """Takes the keys of held pages away."""
        self._unkey(pages.tolist())

    def drop(self, key: bytes) -> None:
        """Takes a key away, whether or not its page is held."""
        if (page := self._by_key.get(key)) is not None:
            pages = np.array([page], np.int32)
            self.pin(pages)
            self.forget(pages)
            self.release(pages)

    def key_of(self, page: int) -> bytes | None:
        """The key of this page."""
        return self._key_of.get(page)

    # -- lower tiers --------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Pages that can be allocated without a loss: FREE, or EVICTABLE and in a lower tier."""
        return self._free + self._lending.ready

    @property
    def keys(self) -> list[bytes]:
        """All keys, in no order."""
        return list(self._by_key)

    def page_of(self, key: bytes) -> int | None:
        """The page with this key."""
        return self._by_key.get(key)

    def pin(self, pages: PageIds) -> None:
        """Adds a holder to pages with a key. For the policy this is no use."""
        for page in pages[self._refcount[pages] == 0].tolist():
            self._evictable.remove(page)
            self._lending.in_use(page)
        self._refcount[pages] += 1

    def start_lending(self, below: Container[bytes] = ()) -> None:
        """There is a lower tier, from before the first page has a key. `below` are its keys."""
        self._below, self._lending.on = below, True

    def lend(self, count: int) -> list[Loan]:
        """Up to `count` of the coldest pages that no lower tier has, for a copy: those that are
        idle longest. Their place in the order of eviction stays, and they may be evicted
        meanwhile: see `take_back`."""
        pages = self._lending.coldest(count)
        return self._lending.lend((page, self._key_of[page]) for page in pages)

    def lend_held(self, pages: PageIds) -> list[Loan]:
        """Lends those of the pages that have a key, no other holder than the caller and no copy
        in a lower tier."""
        alone = pages[self._refcount[pages] == 1].tolist()
        wanted = [page for page in alone if page in self._key_of and self._lending.lacks(page)]
        return self._lending.lend((page, self._key_of[page]) for page in wanted)

    def lend_keys(self, keys: Sequence[bytes]) -> list[Loan]:
        """Lends those pages of these keys that no lower tier has."""
        pages = [self._by_key[key] for key in keys if self._lending.lacks(self._by_key[key])]
        return self._lending.lend((page, self._key_of[page]) for page in pages)

    def unpin(self, pages: PageIds) -> None:
        """Takes the holder of pages that were pinned, coldest first, while they were the coldest.
        They are so again."""
        self.release(pages)
        for page in pages[::-1].tolist():
            if self._is_idle(page):
                self._evictable.demote(page)

    def take_back(self, loans: Iterable[Loan], *, saved: bool) -> list[Loan]:
        """Ends loans. Returns those whose page has kept its key all the time. They count as saved
        if the copy is good."""
        kept = self._lending.end(loans, self._is_idle)
        for loan in kept:
            if saved:
                self._lending.saved(loan.page, idle=self._is_idle(loan.page))
        return kept

    def lost_below(self, key: bytes) -> None:
        """The lower tier has given a key up."""
        page = self._by_key.get(key)
        if page is not None:
            self._lending.unsaved(page, idle=self._is_idle(page))

    def _is_idle(self, page: int) -> bool:
        return page in self._key_of and not self._refcount[page]

    def _emit(self, kind: CacheEventKind, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """A call for each event would take a millisecond for a prompt of 8,000 tokens."""
        if keys:
            events = CacheEvents(self._event_sequence + 1, kind, keys, pages)
            self._event_sequence += len(keys)
            for listener in self._listeners[kind]:
                listener(events)

    def inspect(self) -> None:
        """Gives the watch time to check the free pages."""
        self._watch.idle(self._is_free)

    # -- integrity ----------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raises AssertionError if the module's invariant does not hold."""
        held = self._refcount > 0
        assert (self._refcount >= 0).all(), "negative reference count"
        assert not held[SCRATCH_PAGE], "scratch page held"
        assert not self._is_free[SCRATCH_PAGE], "scratch page free"
        assert not (held & self._is_free).any(), "page both held and free"
        assert int(self._is_free.sum()) == self._free, "free count is off"
        assert len(set(self._settling)) == len(self._settling), "page settling twice"
        assert not held[self._settling].any(), "page both held and settling"
        states = self._free + len(self._evictable) + len(self._settling) + int(held.sum())
        assert states == self.total, "a page is in no state or in two"
        assert len(self._by_key) == len(self._key_of), "key index is off"
        self._lending.check(self._key_of, self._is_idle)
        for key, page in self._by_key.items():
            assert self._key_of[page] == key, "key index is off"
            assert not self._is_free[page], "free page has a key"
            assert self._last_writer[page] <= self._settled_step, "keyed page not settled"

    def check_holders(self, holders: NDArray[np.int32]) -> None:
        """Raises AssertionError if the counts differ from `holders` ([num_pages])."""
        assert (self._refcount == holders).all(), "reference counts and holders differ"
