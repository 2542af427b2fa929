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
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.pages.blocks import BlockManager, CacheEvent, CacheEventKind
from engine.pages.lending import Loan
from engine.tiers.lanes import Copy, Lane, Lanes
from engine.tiers.protocol import Wait
from engine.types import PageIds, TierLoad

HOST: Final = "host"
READY_SHARE: Final = 4
"""A quarter of the pool is kept ready. Prompts come in bursts, and what they evict unsaved is lost;
but a page in both places takes up room for another one."""
BATCH_PAGES: Final = 64
"""Most pages of a save. The step loop takes 0.1 ms for as many."""
MOST_SAVES_AHEAD: Final = 256
"""Pages in saves that have not ended; then no more are begun to keep pages ready."""
MOST_LOADING_SHARE: Final = 4
"""At most this part of the pool, a quarter, is held by loads."""


@dataclass(eq=False, slots=True, kw_only=True)
class Save(Copy):
    """Pages on their way into slots."""

    loans: list[Loan]
    held: bool
    """Whether the tiers hold the pages meanwhile."""


@dataclass(eq=False, slots=True, kw_only=True)
class Load(Copy):
    """Pages on their way into the pool."""

    keys: list[bytes]
    depths: list[int]
    waits: list[Wait] = field(default_factory=list)


class _Keys:
    """The keys that the host tier holds."""

    def __init__(self, host: BlockManager) -> None:
        self._host = host

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._host.page_of(key) is not None


class HostTiers:
    """See the module. It belongs to the step loop's thread.

    Args:
        blocks: the pool's pages.
        host: the slots.
        lanes: copy between them.
        page_tokens: tokens in a page.
        close: called at the end, if no copy is under way any more.
    """

    on = True

    def __init__(
        self,
        blocks: BlockManager,
        host: BlockManager,
        lanes: Lanes,
        page_tokens: int,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._blocks = blocks
        self._host = host
        self._lanes = lanes
        self._page_tokens = page_tokens
        self._close = close
        self._tokens_per_s = 0.0
        self._open: set[Save | Load] = set()
        self._loading: dict[bytes, Load] = {}
        self._held_pages = 0
        """Pages held by saves."""
        self._loaded_tokens: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()
        self._late: Counter[str] = Counter()
        blocks.below = _Keys(host)
        host.subscribe(self._on_host)

    def _on_host(self, event: CacheEvent) -> None:
        if event.kind is CacheEventKind.EVICTED:
            self._blocks.lost_below(event.key)

    def wakes(self, wake: Callable[[], None]) -> None:
        """See `PageTiers`."""
        self._lanes.wakes(wake)

    def turn(self) -> None:
        """See `PageTiers`."""
        for copy in self._lanes.ended():
            assert isinstance(copy, Save | Load)
            self._settle(copy)
        if self._open:
            now = time.monotonic()
            for copy in [one for one in self._open if not one.late and one.due_s < now]:
                self._give_up(copy)
        self._save_ahead()

    def note_rate(self, tokens_per_s: float) -> None:
        """See `PageTiers`."""
        self._tokens_per_s = tokens_per_s

    @property
    def leaving_pages(self) -> int:
        """See `PageTiers`."""
        return self._held_pages

    def wait_s(self, most_s: float) -> float:
        """See `PageTiers`."""
        due = min((copy.due_s for copy in self._open if not copy.late), default=None)
        return most_s if due is None else min(most_s, max(0.001, due - time.monotonic()))

    def load(self) -> TierLoad:
        """See `PageTiers`."""
        lanes = (self._lanes.saves, self._lanes.loads)
        return TierLoad(
            loaded_tokens=self._loaded_tokens.copy(),
            decisions=self._decisions.copy(),
            late=self._late.copy(),
            bytes_moved={lane.name: lane.bytes_moved for lane in lanes},
            bytes_per_s={lane.name: lane.bytes_per_s for lane in lanes},
            slots=self._host.total,
            cached_slots=self._host.evictable,
            held_slots=self._host.total - self._host.available,
        )

    def add_holders(self, holders: NDArray[np.int32]) -> None:
        """See `PageTiers`."""
        waits = set()
        for copy in self._open:
            if isinstance(copy, Load):
                np.add.at(holders, copy.pages, 1)
                waits.update(copy.waits)
            elif copy.held and not copy.late:
                np.add.at(holders, copy.pages, 1)
        for wait in waits:
            np.add.at(holders, wait.pinned, 1)

    def stop(self) -> None:
        """See `PageTiers`."""
        if self._lanes.stop():
            self._close()

    # -- saves ----------------------------------------------------------------------------------

    def _save_ahead(self) -> None:
        """Keeps pages ready for eviction."""
        blocks = self._blocks
        on_way = self._lanes.saves.ahead_pages
        missing = blocks.total // READY_SHARE - blocks.ready - on_way
        unsaved = blocks.free + blocks.evictable - blocks.ready - on_way
        if min(missing, unsaved) <= 0 or on_way >= MOST_SAVES_AHEAD:
            return
        count = min(missing, unsaved, BATCH_PAGES, self._host.available)
        among = blocks.total // READY_SHARE
        self._save(blocks.lend(count, among), held=False)

    def preempted(self, pages: PageIds) -> None:
        """See `PageTiers`. Only as many as there are slots for."""
        if self._lanes.saves.late:
            return
        loans = self._blocks.lend_held(pages)
        room = self._host.available
        self._blocks.take_back(loans[room:], saved=False)
        for start in range(0, min(room, len(loans)), BATCH_PAGES):
            part = loans[start : start + BATCH_PAGES][: room - start]
            self._blocks.share(np.array([loan.page for loan in part], np.int32))
            self._held_pages += len(part)
            self._save(part, held=True)

    def _save(self, loans: list[Loan], *, held: bool) -> None:
        if not loans:
            return
        pages = np.array([loan.page for loan in loans], np.int32)
        slots = np.empty_like(pages)
        slots[pages.argsort()] = self._host.allocate(len(loans))  # Ascending on both sides.
        save = Save(pages=pages, slots=slots, loans=loans, held=held)
        self._open.add(save)
        self._lanes.saves.put(save)

    def _settle_save(self, save: Save) -> None:
        lost = save.late or save.failed
        kept = {loan.page for loan in self._blocks.take_back(save.loans, saved=not lost)}
        if not lost:
            good = [i for i, loan in enumerate(save.loans) if loan.page in kept]
            self._host.adopt(
                save.slots[good].tolist(),
                [save.loans[i].key for i in good],
                [save.loans[i].depth for i in good],
            )
        # The last to be released is evicted last: pages come coldest first, held ones in order.
        self._host.release(save.slots if save.held else save.slots[::-1])
        if save.held and not save.late:
            self._let_go(save)

    def _let_go(self, save: Save) -> None:
        self._held_pages -= len(save.pages)
        self._blocks.release(save.pages)

    # -- loads ----------------------------------------------------------------------------------

    def begin(self, keys: Sequence[bytes], room: int, queued_tokens: int) -> Wait | None:
        """See `PageTiers`."""
        found, missing, joined = self._walk(keys)
        if not missing and not joined:
            return Wait()
        gained = len(found) + len(missing) + len(joined) - self._blocks.count_cached(keys)
        if self._lanes.loads.late:
            self._decisions["stuck"] += 1
            return Wait()
        if not self._is_sooner(len(missing), queued_tokens + gained * self._page_tokens):
            return Wait()
        if not self._has_room(found, len(missing), room):
            return None
        self._decisions["loaded"] += 1
        wait = Wait(pinned=np.array(found, np.int32))
        self._blocks.pin(wait.pinned)
        for load in set(joined):
            self._join(wait, load)
        if missing:
            self._join(wait, self._load(missing))
        return wait

    def _has_room(self, found: list[int], missing: int, room: int) -> bool:
        ahead = self._lanes.loads.ahead_pages
        if ahead and ahead + missing > self._blocks.total // MOST_LOADING_SHARE:
            return False
        return missing + self._blocks.count_idle(found) <= min(room, self._blocks.available)

    def _walk(
        self, keys: Sequence[bytes]
    ) -> tuple[list[int], list[tuple[bytes, int, int]], list[Load]]:
        """The leading keys that are here or can be: pages in the pool; (key, slot, depth) of those
        that the host tier has; for each key under way its load."""
        found: list[int] = []
        missing: list[tuple[bytes, int, int]] = []
        joined: list[Load] = []
        for depth, key in enumerate(keys):
            page = self._blocks.page_of(key)
            if page is not None:
                found.append(page)
            elif (load := self._loading.get(key)) is not None:
                joined.append(load)
            elif (slot := self._host.page_of(key)) is not None:
                missing.append((key, slot, depth))
            else:
                break
        return found, missing, joined

    def _is_sooner(self, pages: int, tokens: int) -> bool:
        """Whether pages can be loaded before `tokens` tokens are computed."""
        if not self._tokens_per_s:
            return True
        sooner = self._lanes.loads.expected_s(pages) < tokens / self._tokens_per_s
        if not sooner:
            self._decisions["computed_sooner"] += 1
        return sooner

    def _load(self, missing: list[tuple[bytes, int, int]]) -> Load:
        slots = np.array([slot for _, slot, _ in missing], np.int32)
        self._host.pin(slots)
        load = Load(
            pages=self._blocks.allocate(len(missing)),
            slots=slots,
            keys=[key for key, _, _ in missing],
            depths=[depth for _, _, depth in missing],
        )
        self._loading.update(dict.fromkeys(load.keys, load))
        self._open.add(load)
        self._lanes.loads.put(load)
        return load

    def _join(self, wait: Wait, load: Load) -> None:
        wait.under_way.add(load)
        load.waits.append(wait)

    def _settle_load(self, load: Load) -> None:
        good = not (load.late or load.failed)
        if not load.late:
            self._host.forget(load.slots)
        self._host.release(load.slots)
        if good:
            self._blocks.adopt(load.pages.tolist(), load.keys, load.depths)
            self._loaded_tokens[HOST] += len(load.keys) * self._page_tokens
        self._blocks.release(load.pages)
        if not load.late:
            self._end_waits(load, good)

    def _end_waits(self, load: Load, good: bool) -> None:
        for key in load.keys:
            del self._loading[key]
        for wait in load.waits:
            wait.under_way.discard(load)
            if good:
                wait.loaded_pages[HOST] += len(load.keys)
            if wait.is_over:
                self._blocks.release(wait.pinned)
                wait.pinned = wait.pinned[:0]
        load.waits = []

    # -- ends of copies -------------------------------------------------------------------------

    def _lane(self, copy: Save | Load) -> Lane:
        return self._lanes.saves if isinstance(copy, Save) else self._lanes.loads

    def _settle(self, copy: Save | Load) -> None:
        lane = self._lane(copy)
        lane.settle(copy)
        if copy.failed and not copy.late:
            self._late[lane.name] += 1
        self._open.discard(copy)
        if isinstance(copy, Save):
            self._settle_save(copy)
        else:
            self._settle_load(copy)

    def _give_up(self, copy: Save | Load) -> None:
        """A copy is late. What it reads or writes is held until it ends; nobody waits for it."""
        copy.late = True
        lane = self._lane(copy)
        lane.late += 1
        self._late[lane.name] += 1
        if isinstance(copy, Save):
            if copy.held:  # What it reads may change now: its slots will get no key.
                self._let_go(copy)
        else:
            self._host.forget(copy.slots)
            self._end_waits(copy, good=False)
