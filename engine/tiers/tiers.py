"""The host tier, as the step loop sees it: saving ahead of eviction, loading, swap.

A page's life below the pool:

    EVICTABLE in the pool -> on loan -> SAVED: in the pool and in a host slot
    SAVED -> evicted from the pool -> only in its slot
    only in its slot -> LOADING -> in the pool; the slot is free again

- **Saves.** A quarter of the pool is kept ready: free, or evictable and saved. The coldest pages
  are lent for that. Nobody waits: a page that is evicted while it is copied is not saved.
- **Swap.** The pages of a preempted sequence are held until they are saved, since they would be
  taken at once. They are found again by their keys, like those of any prompt.
- **Loads.** A request's missing pages are copied into held pages. If that is late or fails, the
  keys miss from then on, and the request computes them. Pages and slots stay held as long as the
  copy lasts, because it cannot be called back.

The slots are a second block manager: a slot is held during a copy and evictable otherwise.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.loads import TierLoad
from engine.pages.blocks import BlockManager
from engine.pages.prefix import ReportPages, report_pages
from engine.pages.watch import CacheEventKind, CacheEvents
from engine.tiers.fetching import Seek, Seeker, StoreTiers
from engine.tiers.lanes import Lanes
from engine.tiers.loading import HostKeys, Load, Looked
from engine.tiers.protocol import Wait
from engine.tiers.saving import Save, Saves
from engine.types import PageIds
from prefixes import index as prefixes

HOST: Final = "host"
MOST_LOADING_SHARE: Final = 4
"""At most this part of the pool, a quarter, is held by loads."""


class HostTiers:
    """See the module. It belongs to the step loop's thread.

    Args:
        blocks: the pool's pages.
        host: the slots.
        lanes: copy between them.
        page_tokens: tokens in a page.
        close: called at the end, if no copy is under way any more.
        stores: what is below the host tier.
    """

    on = True

    def __init__(
        self,
        blocks: BlockManager,
        host: BlockManager,
        lanes: Lanes,
        page_tokens: int,
        close: Callable[[], None] = lambda: None,
        stores: StoreTiers | None = None,
    ) -> None:
        self._blocks = blocks
        self._host = host
        self._lanes = lanes
        self.page_tokens = page_tokens
        self._close = close
        self.stores = stores
        self.seeker: Seeker = self
        """Who decides what comes from stores."""
        self._waits: set[Wait] = set()
        """Waits that hold pages."""
        self._tokens_per_s = 0.0
        self._open: set[Load] = set()
        self._loading: dict[bytes, Load] = {}
        self._saves = Saves(blocks, host, lanes.saves)
        self._loaded_tokens: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()
        if stores is not None:
            host.start_lending()
        self._version: tuple[int, ...] = ()
        self._figures = TierLoad()
        blocks.start_lending(HostKeys(host))
        host.subscribe(self._evicted, (CacheEventKind.EVICTED,))

    def _evicted(self, events: CacheEvents) -> None:
        for key in events.keys:
            self._blocks.lost_below(key)

    def wakes(self, wake: Callable[[], None]) -> None:
        """See `PageTiers`."""
        self._lanes.wakes(wake)
        for process in self.stores.processes if self.stores else ():
            process.wake = wake

    def turn(self) -> None:
        """See `PageTiers`."""
        for copy in self._lanes.ended():
            if isinstance(copy, Save):
                self._saves.settle(copy)
            elif isinstance(copy, Load):
                self._settle(copy)
        now = time.monotonic()
        self._saves.expire(now)
        for load in [one for one in self._open if not one.late and one.due_s < now]:
            self._give_up(load)
        if self.stores:
            self.stores.turn(self.seeker)
        self._saves.ahead()

    def published(self, keys: Sequence[bytes], first: int) -> None:
        """See `PageTiers`."""
        if self.stores:
            self.stores.published(keys, first)

    def drop(self, key: bytes, group: int = 0) -> None:
        """See `PageTiers`."""
        self._host.drop(key)

    def report_pages(self, report: ReportPages, group: int = 0) -> None:
        """See `PageTiers`. The pages are those of a group."""
        report_pages(self._host, prefixes.HOST, report, group)

    def note_rate(self, tokens_per_s: float) -> None:
        """See `PageTiers`."""
        self._tokens_per_s = tokens_per_s

    @property
    def leaving_pages(self) -> int:
        """See `PageTiers`."""
        return self._saves.held_pages

    def wait_s(self, most_s: float) -> float:
        """See `PageTiers`."""
        dues = [copy.due_s for copy in self._open | self._saves.open if not copy.late]
        if self.stores and (due := self.stores.due_s()) is not None:
            dues.append(due)
        return min([most_s, *(max(0.001, due - time.monotonic()) for due in dues)])

    def preempted(self, pages: PageIds) -> None:
        """See `PageTiers`."""
        self._saves.preempted(pages)

    def load(self) -> TierLoad:
        """See `PageTiers`. It is asked for several times a step, and seldom changes."""
        saves, loads = self._lanes.saves, self._lanes.loads
        version = (
            *(saves.ahead_pages, saves.bytes_moved, saves.failures),
            *(loads.ahead_pages, loads.bytes_moved, loads.failures),
            *(self._decisions.total(), self._host.evictable, self._host.available),
            self.stores.version if self.stores else 0,
        )
        if version != self._version:
            self._version, self._figures = version, self._load_now()
        return self._figures

    def _load_now(self) -> TierLoad:
        lanes = (self._lanes.saves, self._lanes.loads)
        moved = {lane.name: lane.bytes_moved for lane in lanes}
        rates = {lane.name: lane.bytes_per_s for lane in lanes}
        late = +Counter({lane.name: lane.failures for lane in lanes})
        if self.stores:
            more_moved, more_rates, failures = self.stores.counts()
            moved, rates, late = moved | more_moved, rates | more_rates, late + failures
        return TierLoad(
            loaded_tokens=self._loaded_tokens.copy(),
            decisions=self._decisions.copy(),
            late=late,
            bytes_moved=moved,
            bytes_per_s=rates,
            slots=self._host.total,
            cached_slots=self._host.evictable,
            held_slots=self._host.total - self._host.available,
        )

    def add_holders(self, holders: NDArray[np.int32], group: int = 0) -> None:
        """See `PageTiers`. There is one group."""
        self._saves.add_holders(holders)
        for load in self._open:
            np.add.at(holders, load.pages, 1)
        for wait in self._waits:
            np.add.at(holders, wait.pinned, 1)

    def stop(self) -> None:
        """See `PageTiers`."""
        if self.stores:
            self.stores.stop()
        if self._lanes.stop():
            self._close()

    # -- fetches --------------------------------------------------------------------------------

    def is_coming(self, key: bytes, group: int = 0) -> bool:
        """See `PageTiers`. There is one group."""
        return key in self._loading

    def fetched(self, wait: Wait) -> None:
        """See `PageTiers`."""
        self._end_if_over(wait)

    def bring(self, keys: Sequence[Sequence[bytes]], rooms: Sequence[int]) -> Wait:
        """See `PageTiers`. There is one group."""
        (own,), (room,) = keys, rooms
        looked, wait = self.look(own), Wait()
        if not (looked.is_here or self.is_late) and self.has_room(looked, room):
            self.start(wait, looked)
        return wait

    # -- loads ----------------------------------------------------------------------------------

    def begin(
        self,
        keys: Sequence[bytes],
        room: int,
        queued_tokens: int,
        others_room: Sequence[int] = (),
    ) -> Wait | None:
        """See `PageTiers`. There is one group."""
        looked = self.look(keys)
        objects = self.stores.seek(keys, looked.total) if self.stores else []
        if looked.is_here and not objects:
            return Wait()
        gained = (looked.total - self.count_cached(keys)) * self.page_tokens
        expected_s = self.expected_s(len(looked.missing))
        if gained and not self.is_worth_it(
            expected_s, queued_tokens + gained, is_late=self.is_late
        ):
            return Wait()
        if not self.has_room(looked, room):
            return None
        wait = Wait()
        self.start(wait, looked)
        if self.stores and objects:
            kept_back = self._blocks.available - room
            first = len(keys) // self.stores.stride - len(objects)
            self.stores.begin(Seek(keys, first, objects, queued_tokens, kept_back, wait))
        self._end_if_over(wait)
        return wait

    def start(self, wait: Wait, looked: Looked) -> None:
        """Holds what is in the pool, and lets the rest come."""
        self._waits.add(wait)
        found, missing, joined = looked
        held = set(wait.pinned.tolist())  # A prompt is looked up again after a fetch.
        pages = np.array([page for page in found if page not in held], np.int32)
        self._blocks.pin(pages)
        wait.pinned = np.concatenate([wait.pinned, pages])
        wait.coming_pages += len(missing) + len(joined)
        loads = set(joined)
        if missing:
            loads.add(self._load(missing))
        for load in loads - wait.under_way:
            wait.under_way.add(load)
            load.waits.append(wait)
        self._decisions["loaded"] += bool(loads)

    def found(self, seek: Seek) -> None:
        """See `Seeker`."""
        assert self.stores is not None
        process, count = seek.leading()
        if process is None:
            return
        pages = count * self.stores.pages
        tokens = seek.queued_tokens + pages * self.page_tokens
        if self.is_sooner(process.expected_s(count) + self.expected_s(pages), tokens):
            self.stores.fetch(process, seek, 0, count)

    def sought(self, seek: Seek) -> None:
        """See `Seeker`."""
        seek.wait.under_way.discard(seek)
        looked, room = self.look(seek.keys), self._blocks.available - seek.kept_back
        if not (looked.is_here or self.is_late) and self.has_room(looked, room):
            self.start(seek.wait, looked)
        self._end_if_over(seek.wait)

    def _end_if_over(self, wait: Wait) -> None:
        if wait.is_over and wait in self._waits:
            self._waits.remove(wait)
            self._blocks.release(wait.pinned)

    def has_room(self, looked: Looked, room: int) -> bool:
        """Whether at most `room` pages are taken, and loads hold no more than their share."""
        ahead, missing = self._lanes.loads.ahead_pages, len(looked.missing)
        if ahead and ahead + missing > self._blocks.total // MOST_LOADING_SHARE:
            return False
        return missing + self._blocks.count_idle(looked.found) <= min(room, self._blocks.available)

    def look(self, keys: Sequence[bytes]) -> Looked:
        """The leading ones of these pages that are here or can be."""
        found: list[int] = []
        missing: list[tuple[bytes, int]] = []
        joined: list[Load] = []
        for key in keys:
            page = self._blocks.page_of(key)
            if page is not None:
                found.append(page)
            elif (load := self._loading.get(key)) is not None:
                joined.append(load)
            elif (slot := self._host.page_of(key)) is not None:
                missing.append((key, slot))
            else:
                break
        return Looked(found, missing, joined)

    def has(self, key: bytes) -> bool:
        """Whether a page is here or can be."""
        books = self._blocks, self._host
        return key in self._loading or any(one.page_of(key) is not None for one in books)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """Leading pages that are here or can be."""
        return next((at for at, key in enumerate(keys) if not self.has(key)), len(keys))

    def count_cached(self, keys: Sequence[bytes]) -> int:
        """Leading pages that are in the pool."""
        return self._blocks.count_cached(keys)

    @property
    def available_pages(self) -> int:
        """Pages of the pool that can be allocated now."""
        return self._blocks.available

    def count_held(self) -> int:
        """Pages of the pool that are held for loads and for who waits for them."""
        loads = sum(len(load.pages) for load in self._open)
        return loads + sum(len(wait.pinned) for wait in self._waits)

    def expected_s(self, pages: int) -> float:
        """Seconds until a load of so many pages would end."""
        return self._lanes.loads.expected_s(pages)

    @property
    def is_late(self) -> bool:
        """Whether a load is late, so that others may be."""
        return bool(self._lanes.loads.late)

    def is_worth_it(self, seconds: float, tokens: int, *, is_late: bool) -> bool:
        """Whether a load of so many seconds saves time to a prompt that ends behind `tokens`
        tokens. It is counted."""
        if is_late:
            self._decisions["stuck"] += 1
            return False
        return self.is_sooner(seconds, tokens)

    def is_sooner(self, seconds: float, tokens: int) -> bool:
        """Whether so many seconds pass before `tokens` tokens are computed."""
        if not self._tokens_per_s:
            return True
        sooner = seconds < tokens / self._tokens_per_s
        if not sooner:
            self._decisions["computed_sooner"] += 1
        return sooner

    def _load(self, missing: list[tuple[bytes, int]]) -> Load:
        slots = np.array([slot for _, slot in missing], np.int32)
        self._host.pin(slots)
        load = Load(
            pages=self._blocks.allocate(len(missing)),
            slots=slots,
            keys=[key for key, _ in missing],
            tiers=Counter(self._tier_of(key) for key, _ in missing),
        )
        self._loading.update(dict.fromkeys(load.keys, load))
        self._open.add(load)
        self._lanes.loads.put(load)
        return load

    def _tier_of(self, key: bytes) -> str:
        return self.stores.came_from.get(key, HOST) if self.stores else HOST

    def _settle_load(self, load: Load) -> None:
        good = not (load.late or load.failed)
        if good:
            self._blocks.arrivals.note(load.pages)
            self._blocks.adopt(load.pages.tolist(), load.keys)
            for tier, count in load.tiers.items():
                self._loaded_tokens[tier] += count * self.page_tokens
        if not load.late:
            self._host.forget(load.slots)
        self._host.release(load.slots)
        self._blocks.release(load.pages)
        if not load.late:
            self._end_waits(load, good)

    def _end_waits(self, load: Load, good: bool) -> None:
        for key in load.keys:
            del self._loading[key]
        for wait in load.waits:
            wait.under_way.discard(load)
            if good:
                wait.loaded_pages.update(load.tiers)
            self._end_if_over(wait)
        load.waits = []

    def _settle(self, load: Load) -> None:
        self._lanes.loads.settle(load)
        self._open.discard(load)
        self._settle_load(load)

    def _give_up(self, load: Load) -> None:
        """A load is late. What it reads and writes is held until it ends; nobody waits for it."""
        self._lanes.loads.mark_late(load)
        self._host.forget(load.slots)
        self._end_waits(load, good=False)
