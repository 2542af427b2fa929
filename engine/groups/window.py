"""Pages of layers with a sliding window. A sequence holds only the pages of its last tokens.

Each sequence has a page table in which a token's page has the same index as in group 0, the pages
of layers that see all tokens. The sequence holds the indices [`first`, `end`). Entries before
`first` are stale and not used. A page is allocated just before the step that stores its first
token. It is freed after the last step that reads it has settled, because steps in flight may still
read it.

A freed page that has a key stays in the prefix cache. Most of these are evicted before all other
pages: there are many of them, and few are found again. Two kinds are evicted later:

- the last pages of a sequence that has ended, because the next turn of its conversation resumes
  there;
- the window before the end of the prefix that group 0 had cached, because prompts that share a
  beginning resume there. Where its pages are missing, this prompt computes them, and the next one
  finds them.

A sequence can be resumed only at a border between two pages. It keeps the window that
ends at the last such border before its last token. So a preempted or handed-off prompt can be
resumed there.

The number of pages that a sequence needs is bounded, and they are promised to it at admission:

    (sum over slots of max(held, needed)) + held for transfers + lent + room for chunks <= all pages

A slot's `held` pages are those that it has now. `needed` is the most that it has at any time,
without those of a prompt's chunk. `lent` pages are those that `lenders` count. Room for chunks is
what chunks may still take.

So a sequence waits for a page until the step in flight has settled, and no longer, and no sequence
is preempted for lack of window pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.bounds import Bounds
from engine.group_pages import GroupGrant, GroupPages
from engine.groups.sizing import chunk_pages
from engine.groups.spec import Window, name_of
from engine.pages.blocks import BlockManager
from engine.pages.following import follow
from engine.pages.growth import grow_oldest
from engine.step.plan import GroupTable, Int32s
from engine.types import SCRATCH_PAGE, PageIds

Slots = NDArray[np.intp]


class WindowPages:
    """Who holds which page of a window's group. It belongs to the step loop's thread."""

    def __init__(self, config: Bounds, window: Window, blocks: BlockManager) -> None:
        """`blocks` are the group's pages."""
        slots, size = config.max_sequences, config.page_size
        self.name = name_of(window)
        self.blocks = blocks
        self.table = np.zeros((slots, -(-config.max_context_tokens // size)), np.int32)
        self.first = np.zeros(slots, np.int32)
        """By slot: index of the first page that is held."""
        self.end = np.zeros(slots, np.int32)
        """By slot: index behind the last one."""
        self._known = np.zeros(slots, np.int32)
        """By slot: pages of the prompt that group 0 had cached."""
        self._window = window
        self._size = size
        self._before = window.pages_before(size)
        self._most = window.most_pages(size)
        self._chunks = min(chunk_pages(config), blocks.total // 2)
        self._kept = 0
        """Pages that transfers may use, of sequences without a slot."""
        self._copies: dict[int, int] = {}
        """Target page -> source page, for the next step."""
        self.lenders: list[Callable[[], int]] = []
        """Count pages that are held beside those of sequences: for loads and for fetches."""

    # -- how many pages ---------------------------------------------------------------------------

    def needed(self, final_pages: int) -> int:
        """The most pages that a sequence holds here, beside those of a prompt's chunk, if it ends
        with `final_pages` pages in group 0."""
        return min(final_pages, self._most)

    def can_ever_hold(self, sequences: int, final_pages: int) -> bool:
        """Whether `sequences` sequences of that length fit when nothing else is held."""
        needed = sequences * self.needed(final_pages)
        return needed + min(self._chunks, sequences * final_pages - needed) <= self.blocks.total

    def has_room(self, sequences: int, pages_each: int, final_pages: Int32s) -> bool:
        """Whether `sequences` more sequences fit beside the running ones.

        Args:
            sequences: number of new sequences.
            pages_each: pages in group 0 of each of them at its end.
            final_pages: by slot, pages in group 0 of each running sequence at its end.
        """
        held, needed = self.end - self.first, np.minimum(final_pages, self._most)
        wanted = sequences * self.needed(pages_each)
        most = sequences * pages_each - wanted + int((final_pages - needed).sum())
        chunks = min(self._chunks, most) - int(np.maximum(held - needed, 0).sum())
        return wanted + self._promised(final_pages) + max(0, chunks) <= self.blocks.total

    def free_sequences(self, final_pages: Int32s) -> int:
        """How many more sequences of unbounded length fit. `final_pages`: of running ones."""
        free = self.blocks.total - self._chunks - self._promised(final_pages)
        return max(0, free) // self._most

    def room(self, final_pages: Int32s) -> int:
        """Pages that are not promised to a sequence. `final_pages`: of running ones."""
        held, needed = self.end - self.first, np.minimum(final_pages, self._most)
        chunks = min(self._chunks, int((final_pages - needed).sum()))
        chunks -= int(np.maximum(held - needed, 0).sum())
        return self.blocks.total - self._promised(final_pages) - max(0, chunks)

    def _promised(self, final_pages: Int32s) -> int:
        held = self.end - self.first
        return (
            int(np.maximum(held, np.minimum(final_pages, self._most)).sum())
            + self._kept
            + sum(lent() for lent in self.lenders)
        )

    def most_end(self, slot: int, final_pages: Int32s) -> int:
        """The longest prefix, in tokens, of the prompt in `slot` that can get pages now."""
        held = int(self.end[slot] - self.first[slot])
        own = max(0, self.needed(int(final_pages[slot])) - held)
        free = self.blocks.total - self._promised(final_pages) + own
        return (int(self.end[slot]) + max(0, min(free, self.blocks.available))) * self._size

    def allocate_spares(self, count: int) -> PageIds:
        """Pages for copies of a partial page."""
        return self.blocks.allocate_apart(count)

    # -- the prefix cache -------------------------------------------------------------------------

    def resumable(
        self, keys: Sequence[bytes], most: int, has: Callable[[bytes], bool] | None = None
    ) -> int:
        """The longest prefix of a prompt, at most `most` pages, at whose end it can be resumed: the
        window before that end is cached, or `has` says of its pages that they are elsewhere."""
        has, run, end = has or self._is_cached, 0, most
        if not self._before:
            return most
        for index in range(most - 1, -1, -1):
            if not has(keys[index]):
                run, end = 0, index
                continue
            run += 1
            if run >= self._before:
                return end
        return end  # What is left reaches back to the first token.

    def _is_cached(self, key: bytes) -> bool:
        return self.blocks.page_of(key) is not None

    def begins(self, cached: int) -> int:
        """Index of the first page that a sequence needs which goes on behind `cached` pages."""
        return max(0, cached - self._before)

    def begin(self, slot: int, keys: Sequence[bytes], cached: int, known: int) -> None:
        """A sequence goes on behind `cached` pages, which `resumable` allowed. `known`: pages of
        its prompt that group 0 had cached."""
        first = self.begins(cached)
        pages = self.blocks.acquire(keys[first:cached])
        assert len(pages) == cached - first, "the window before a cached prefix is cached"
        self._set(slot, GroupPages(first, pages))
        self._known[slot] = known

    def can_reserve(self, num_tokens: int, spares: int) -> bool:
        """See `OtherGroups.can_reserve`. What is cached counts as if it was not."""
        pages = -(-num_tokens // self._size) - self.kept_from(num_tokens)
        return pages + spares <= self.blocks.available

    def reserve(self, slot: int, num_tokens: int, keys: Sequence[bytes]) -> GroupGrant:
        """Pages for the window of a prompt that another worker computes."""
        first = self.kept_from(num_tokens)
        cached = self.blocks.acquire(keys[first:])
        count = -(-num_tokens // self._size) - first - len(cached)
        kept = GroupPages(first, np.concatenate([cached, self.blocks.allocate(count)]))
        self._set(slot, kept)
        self._known[slot] = 0
        return GroupGrant(first, kept.pages, len(cached))

    def publish(self, kept: GroupPages, keys: Sequence[bytes]) -> None:
        """Keys the complete pages among these. `keys` are those of the sequence."""
        complete = keys[kept.first_page : kept.first_page + len(kept.pages)]
        self.blocks.publish(kept.pages[: len(complete)], complete)

    # -- steps ------------------------------------------------------------------------------------

    def extend(self, slot: int, end_token: int) -> None:
        """Gives the prompt in `slot` pages up to `end_token`."""
        end, needed = int(self.end[slot]), -(-end_token // self._size)
        if needed > end:
            self.table[slot, end:needed] = self.blocks.allocate(needed - end)
            self.end[slot] = needed

    def grow(self, rows: Slots, kv_len: Int32s, seniority: NDArray[np.int64]) -> Slots:
        """Gives decode rows a page for the token that each stores next. Returns the rows that wait
        for one. `kv_len` and `seniority` are by row."""
        short = kv_len >= self.end[rows] * self._size
        if not short.any():
            return rows[:0]
        oldest = np.argsort(seniority[short], kind="stable")
        wanting = rows[short][oldest]
        served, waiting = np.split(wanting, [min(len(wanting), self.blocks.available)])
        self.table[served, self.end[served]] = self.blocks.allocate_apart(len(served))
        self.end[served] += 1
        return waiting

    def grow_ahead(self, rows: Slots, most: Int32s, seniority: NDArray[np.int64]) -> Int32s:
        """As `OtherGroups.grow_ahead`. No row gets more than what is promised to it."""
        missing = -(-most // self._size) - self.end[rows]
        if (missing > 0).any():
            missing = np.minimum(missing, self._most - (self.end - self.first)[rows]).clip(min=0)
            grow_oldest(self.blocks, self.table, self.end, rows, missing, seniority)
        bounds: Int32s = np.minimum(most, self.end[rows] * self._size)
        return bounds

    def table_of(self, slots: Int32s, starts: Int32s, contexts: Int32s, step: int) -> GroupTable:
        """The pages of a step's rows, whose new tokens are at positions [start, context). Makes
        this step their last writer."""
        size, width = self._size, self.table.shape[1]
        skipped = np.maximum(starts - (self._window.tokens - 1), 0) // size
        used = -(-contexts // size) - skipped
        columns = np.arange(max(1, int(used.max(initial=1))))
        # Behind the context of a row this reads those of others, and makes them the scratch page.
        places = (slots.astype(np.intp) * width + skipped)[:, None] + columns
        pages = self.table.reshape(-1).take(places, mode="clip")
        np.copyto(pages, SCRATCH_PAGE, where=columns >= used[:, None])
        self._mark_written(slots, starts, contexts, step)
        copies, self._copies = self._copies, {}
        return GroupTable(
            pages,
            skipped.astype(np.int32, copy=False),
            np.fromiter(copies.values(), np.int32, len(copies)),
            np.fromiter(copies.keys(), np.int32, len(copies)),
        )

    def _mark_written(self, slots: Int32s, starts: Int32s, contexts: Int32s, step: int) -> None:
        size = self._size
        firsts, lasts = starts // size, (contexts - 1) // size
        single = firsts == lasts
        pages = [self.table[slots[single], firsts[single]]]
        pages += [
            self.table[slots[row], firsts[row] : lasts[row] + 1]
            for row in np.flatnonzero(~single).tolist()
        ]
        self.blocks.mark_written(np.concatenate(pages), step)

    def take_back(self, slot: int, first: int, end: int, step: int) -> None:
        """See `OtherGroups.take_back`."""
        self.blocks.mark_written(self.table[slot, first:end], step)

    def kept_from(self, num_tokens: int) -> int:
        """Index of the first page that a sequence of so many tokens keeps."""
        return max(0, (num_tokens - 1) // self._size - self._before)

    def passed(self, slots: Slots | Int32s, num_tokens: Int32s) -> None:
        """A step has settled with which the sequences in these slots have so many tokens stored.
        Pages that only this step and earlier ones have read are let go."""
        first = np.maximum((num_tokens - 1) // self._size - self._before, 0)
        moved = first > self.first[slots]
        if not moved.any():
            return
        slots, end = slots[moved], first[moved]
        counts = end - self.first[slots]
        rows = np.repeat(slots, counts)
        at = np.arange(len(rows)) + np.repeat(end - counts.cumsum(), counts)
        pages, known = self.table[rows, at], self._known[rows]
        warm = (at >= known - self._before) & (at < known)
        self.first[slots] = end
        for part in self._apart(pages, counts):
            self.blocks.release(pages[part & warm])
            self.blocks.unpin(pages[part & ~warm])

    @staticmethod
    def _apart(pages: PageIds, counts: Int32s) -> list[NDArray[np.bool_]]:
        """Which of the pages to let go at once: choices of a request may share some, and no page
        may be let go twice at once. `counts` are pages by sequence."""
        if len(np.unique(pages)) == len(pages):
            return [np.ones(len(pages), np.bool_)]
        owner = np.repeat(np.arange(len(counts)), counts)
        return [owner == one for one in range(len(counts))]

    # -- sequences --------------------------------------------------------------------------------

    def fork(self, leader: int, follower: int, length: int, spare: int | None, step: int) -> None:
        """The follower goes on from the leader's `length` tokens. Full pages are shared. A partial
        page is copied to `spare` before `step`, the next one."""
        first = max(self.kept_from(length), int(self.first[leader]))
        end = min(int(self.end[leader]), -(-length // self._size))
        own = self.table[leader, first:end].copy()
        if spare is None:
            self.blocks.share(own)
        else:
            self.blocks.share(own[:-1])
            self._copies[spare] = int(own[-1])
            self.blocks.mark_written(np.array([spare, own[-1]], np.int32), step)
            own[-1] = spare
        self._set(follower, GroupPages(first, own))

    def stored(self, table: GroupTable, rows: Int32s, position: int) -> PageIds:
        """See `OtherGroups.stored`."""
        if (position + 1) % self._size == 0:
            return np.zeros(0, np.int32)
        pages: PageIds = table.pages[rows, position // self._size - table.skipped[rows]]
        return pages

    def follow(self, own: Slots, those: Slots, full: int) -> None:
        """See `OtherGroups.follow`. All have the same tokens in their windows."""
        first = int(self.first[own].max())
        if first < full:
            follow(self.blocks, self.table[:, first:full], own, those)

    @property
    def has_copies(self) -> bool:
        """Whether copies wait for a step."""
        return bool(self._copies)

    def take(self, slot: int) -> GroupPages:
        """Takes the pages of a sequence that leaves its slot. The caller lets them go."""
        first, end = int(self.first[slot]), int(self.end[slot])
        self.first[slot] = self.end[slot] = 0
        return GroupPages(first, self.table[slot, first:end].copy())

    def pages(self, slot: int) -> GroupPages:
        """The pages of the sequence in `slot`."""
        first, end = int(self.first[slot]), int(self.end[slot])
        return GroupPages(first, self.table[slot, first:end].copy())

    def keep(self, kept: GroupPages) -> None:
        """A transfer may use these pages, which have been taken."""
        self._kept += len(kept.pages)

    def release_kept(self, kept: GroupPages) -> None:
        """No transfer uses them any more."""
        self._kept -= len(kept.pages)
        self.blocks.release(kept.pages)

    def settled(self, step: int) -> None:
        """A step and all before it are done. See `BlockManager.settle`."""

    def check(self) -> None:
        """Nothing to check: the code that shares pages takes care that nobody writes them."""

    @property
    def left_pages(self) -> PageIds:
        """Pages that steps in flight alone hold: none."""
        return np.zeros(0, np.int32)

    def _set(self, slot: int, kept: GroupPages) -> None:
        end = kept.first_page + len(kept.pages)
        self.table[slot, kept.first_page : end] = kept.pages
        self.first[slot], self.end[slot] = kept.first_page, end
