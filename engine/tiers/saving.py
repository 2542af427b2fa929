"""Saves: pages of the pool on their way into host slots. See `engine.tiers.tiers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.pages.blocks import BlockManager
from engine.pages.lending import Loan
from engine.tiers.lanes import Copy, Lane
from engine.types import PageIds

READY_SHARE: Final = 4
"""A quarter of the pool is kept ready. Prompts come in bursts, and what they evict unsaved is lost;
but a page in both places takes up room for another one."""
BATCH_PAGES: Final = 8
"""Most pages of a save, and of the saves that a turn of the step loop begins ahead of eviction."""
MOST_SAVES_AHEAD: Final = 256
"""Pages in saves that have not ended; then no more are begun to keep pages ready."""


@dataclass(eq=False, slots=True, kw_only=True)
class Save(Copy):
    """Pages on their way into slots."""

    loans: list[Loan]
    held: bool
    """Whether the tiers hold the pages meanwhile."""


class Saves:
    """Belongs to the step loop's thread.

    Args:
        blocks: the pool's pages.
        host: the slots.
        lane: copies into them.
    """

    def __init__(self, blocks: BlockManager, host: BlockManager, lane: Lane) -> None:
        self._blocks = blocks
        self._host = host
        self._lane = lane
        self.open: set[Save] = set()
        self.held_pages = 0

    def settle(self, save: Save) -> None:
        """A save has ended."""
        self._lane.settle(save)
        self.open.discard(save)
        self._settle_save(save)

    def expire(self, now: float) -> None:
        """Gives up what is late. What a late save reads may change: its slots will get no key."""
        for save in [one for one in self.open if not one.late and one.due_s < now]:
            self._lane.mark_late(save)
            if save.held:
                self._let_go(save)

    def add_holders(self, holders: NDArray[np.int32]) -> None:
        """Adds the pages that are held here to `holders` ([num_pages])."""
        for save in self.open:
            if save.held and not save.late:
                np.add.at(holders, save.pages, 1)

    def ahead(self) -> None:
        """Keeps pages ready for eviction."""
        blocks = self._blocks
        on_way = self._lane.ahead_pages
        # More than there are slots would be saved in turns, for ever.
        wanted = min(blocks.total // READY_SHARE, self._host.total)
        missing = wanted - blocks.ready - on_way
        unsaved = blocks.free + blocks.evictable - blocks.ready - on_way
        if min(missing, unsaved) <= 0 or on_way >= MOST_SAVES_AHEAD:
            return
        count = min(missing, unsaved, BATCH_PAGES, self._host.available)
        self._save(blocks.lend(count), held=False)

    def preempted(self, pages: PageIds) -> None:
        """Saves those pages that have a key, as many as there are slots for. They are held by the
        sequence, and here until they are saved."""
        if self._lane.late:
            return
        loans = self._blocks.lend_held(pages)
        room = self._host.available
        self._blocks.take_back(loans[room:], saved=False)
        for start in range(0, min(room, len(loans)), BATCH_PAGES):
            part = loans[start : start + BATCH_PAGES][: room - start]
            self._blocks.share(np.array([loan.page for loan in part], np.int32))
            self.held_pages += len(part)
            self._save(part, held=True)

    def _save(self, loans: list[Loan], *, held: bool) -> None:
        if not loans:
            return
        pages = np.array([loan.page for loan in loans], np.int32)
        slots = np.empty_like(pages)
        slots[pages.argsort()] = self._host.allocate_apart(len(loans))  # Ascending on both sides.
        save = Save(pages=pages, slots=slots, loans=loans, held=held)
        self.open.add(save)
        self._lane.put(save)

    def _settle_save(self, save: Save) -> None:
        lost = save.late or save.failed
        kept = {loan.page for loan in self._blocks.take_back(save.loans, saved=not lost)}
        if not lost:
            good = [i for i, loan in enumerate(save.loans) if loan.page in kept]
            keys = [save.loans[i].key for i in good]
            self._host.adopt(save.slots[good].tolist(), keys)
        # The last to be released is evicted last: pages come coldest first, held ones in order.
        self._host.release(save.slots if save.held else save.slots[::-1])
        if save.held and not save.late:
            self._let_go(save)

    def _let_go(self, save: Save) -> None:
        self.held_pages -= len(save.pages)
        self._blocks.release(save.pages)
