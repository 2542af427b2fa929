"""The pages of layers that fold all tokens into a state: a sequence has one.

A step reads a page of each row and writes one. Mostly it is the same. It is another one where
others need the old state: a choice that goes on from it, a later prompt that may find it by its
key, a tier that copies it. Nobody writes a page that others may read. Page 0 is read as zeros, so a
new sequence needs no page that was cleared.

    page    the newest state of a slot: the next step reads it. 0: no token is folded in yet
    next    the page that the next step writes, where it must not write `page`
    saved   states of the past, which are kept until they have keys, or are of no use any more

A state that a later prompt may go on from is written to a page of its own, beside the row's, by the
step that passes its last token. That is done at the last place of a prompt where it may be, at the
place up to which group 0 knew the prompt, because prompts that begin alike part there, at the last
place where an object of a store ends, and now and then while a sequence decodes. Of the last kind
a sequence keeps the newest, until it ends.

A page that a step in flight reads, and whose slot has another one by now, is held until the step
has settled. A sequence needs one page, which is promised to it when it gets a slot:

    slots in use + held for transfers and by tiers <= all pages

Whoever needs another page and finds none waits until the step in flight has settled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.bounds import UNBOUNDED, Bounds
from engine.group_pages import GroupGrant, GroupPages
from engine.groups.spec import State, name_of
from engine.pages.blocks import BlockManager
from engine.step.plan import GroupTable, Int32s
from engine.types import PageIds

Slots = NDArray[np.intp]
DECODED_TOKENS = 128
"""While a sequence decodes, every so many tokens its state is kept for the next turn. At most so
many are computed again. With 256 a next turn's first token comes 0.8 ms later, and with 64 states
take 0.3 % more of decoding (`bench/README.md`)."""


class StatePages:
    """Who holds which page of a state's group. It belongs to the step loop's thread."""

    def __init__(self, config: Bounds, state: State, blocks: BlockManager) -> None:
        """`blocks` are the group's pages."""
        slots = config.max_sequences
        self.name = name_of(state)
        self.blocks = blocks
        self.page = np.zeros(slots, np.int32)
        """By slot: see the module."""
        self._next = np.zeros(slots, np.int32)
        self._is_shared = np.zeros(slots, np.bool_)
        """By slot: others may read `page`."""
        self._size = config.page_size
        self._grid = state.grid_pages(config.page_size)
        self._places = [self._grid]
        """Where a state of a prompt is kept: at the last multiple of so many pages. Objects in
        stores end at multiples of their own."""
        if config.object_tokens:
            size = max(1, config.object_tokens // config.page_size)
            self._places.append(math.lcm(size, self._grid))
        self._keeps = config.prefix_cache
        self._wanted: dict[int, list[int]] = {}
        """By slot: numbers of a prompt's tokens behind which its state is to be kept."""
        self._of_prompts: dict[int, list[tuple[int, int]]] = {}
        """By slot: saved states of the prompt: tokens and page."""
        self._decoded: dict[int, tuple[int, int]] = {}
        """By slot: the saved state of the answer."""
        self._left: list[tuple[int, int]] = []
        """Pages that no slot has any more, each with the step that reads it: (step, page)."""
        self._kept = 0
        self.lenders: list[Callable[[], int]] = []
        """Count pages that are held beside those of sequences: for loads and for fetches."""

    # -- how many pages ---------------------------------------------------------------------------

    def can_ever_hold(self, sequences: int, final_pages: int) -> bool:
        """Whether so many sequences fit into an empty group, however long they become."""
        return sequences <= self.blocks.total

    def has_room(self, sequences: int, pages_each: int, final_pages: Int32s) -> bool:
        """Whether so many sequences fit beside those in slots. `final_pages`: by slot."""
        self._reclaim()
        return self.blocks.available > 0 and sequences <= self.room(final_pages)

    def free_sequences(self, final_pages: Int32s) -> int:
        """How many sequences have room beside those in slots. `final_pages`: by slot."""
        return max(0, self.room(final_pages))

    def room(self, final_pages: Int32s) -> int:
        """Pages that are promised to nobody. `final_pages`: by slot."""
        lent = sum(lent() for lent in self.lenders)
        return self.blocks.total - int(np.count_nonzero(final_pages)) - self._kept - lent

    def most_end(self, slot: int, final_pages: Int32s) -> int:
        """The tokens up to which the prompt in `slot` may be computed now."""
        return UNBOUNDED if self._may_write(slot) else 0

    def allocate_spares(self, count: int) -> PageIds:
        """Nothing: choices read one state and write their own, so none is copied."""
        return np.zeros(0, np.int32)

    # -- the prefix cache -------------------------------------------------------------------------

    def resumable(
        self, keys: Sequence[bytes], most: int, has: Callable[[bytes], bool] | None = None
    ) -> int:
        """The most leading pages, up to `most`, behind which a sequence can go on: their state is
        in the cache, or where `has` says."""
        has = has or self._is_cached
        for end in range(most - most % self._grid, 0, -self._grid):
            if has(keys[end - 1]):
                return end
        return 0

    def _is_cached(self, key: bytes) -> bool:
        return self.blocks.page_of(key) is not None

    def begins(self, cached: int) -> int:
        """Index of the first page that a sequence needs which goes on behind `cached` pages: of
        states it is the last one."""
        return max(0, cached - 1)

    def begin(self, slot: int, keys: Sequence[bytes], cached: int, known: int) -> None:
        """A sequence goes on behind `cached` pages, which `resumable` allowed. `known`: pages of
        its prompt that group 0 had cached."""
        if cached:
            (page,) = self.blocks.acquire(keys[cached - 1 : cached])
            self.page[slot], self._is_shared[slot] = page, True
        ends = {len(keys) - len(keys) % each for each in self._places}
        ends.add(min(known, len(keys)) // self._grid * self._grid)
        wanted = [end * self._size for end in sorted(ends) if end > cached]
        if wanted and self._keeps:
            self._wanted[slot] = wanted

    def can_reserve(self, num_tokens: int, spares: int) -> bool:
        """See `OtherGroups.can_reserve`: one page, for which `has_room` has looked."""
        return True

    def reserve(self, slot: int, num_tokens: int, keys: Sequence[bytes]) -> GroupGrant:
        """A page for the state of a prompt that another worker computes."""
        page = self._allocate()
        assert page, "a request is admitted if there is a page"
        self.page[slot] = page
        return GroupGrant(0, np.array([page], np.int32), 0)

    def publish(self, kept: GroupPages, keys: Sequence[bytes]) -> None:
        """Keys those of the states that are kept for later prompts. `keys` are those of the
        sequence."""
        for page, tokens in zip(kept.pages.tolist(), kept.tokens, strict=True):
            index = tokens // self._size - 1
            if tokens and index < len(keys):
                self.blocks.publish(np.array([page]), keys[index : index + 1])

    # -- steps ------------------------------------------------------------------------------------

    def extend(self, slot: int, end_token: int) -> None:
        """Gives the prompt in `slot` a page to write, which `most_end` allowed."""
        given = self._make_writable(slot)
        assert given, "there is a page to write"

    def grow(self, rows: Slots, kv_len: Int32s, seniority: NDArray[np.int64]) -> Slots:
        """Gives decode rows pages that they may write. Returns the rows that wait for one.
        `kv_len` and `seniority` are by row."""
        short = self._is_shared[rows]
        if not short.any():
            return rows[:0]
        oldest = rows[short][np.argsort(seniority[short], kind="stable")]
        waiting = [slot for slot in oldest.tolist() if not self._make_writable(slot)]
        return np.array(waiting, np.intp)

    def _may_write(self, slot: int) -> bool:
        page = int(self.page[slot])
        if (page and not self._is_shared[slot]) or self._next[slot]:
            return True
        self._reclaim()
        return self.blocks.available > 0 or (page > 0 and self.blocks.has_one_holder(page))

    def _make_writable(self, slot: int) -> bool:
        """Whether the next step has a page to write for a slot."""
        page = int(self.page[slot])
        if page and self._is_shared[slot] and self.blocks.is_alone(page):
            self._is_shared[slot] = False
        if (page and not self._is_shared[slot]) or self._next[slot]:
            return True
        if new := self._allocate():
            self._next[slot] = new
            return True
        if page and self.blocks.has_one_holder(page):  # Rather than wait for ever, it is not kept.
            self.blocks.forget(np.array([page], np.int32))
            self._is_shared[slot] = False
            return True
        return False

    def _allocate(self) -> int:
        """A page; 0: there is none."""
        self._reclaim()
        return int(self.blocks.allocate_apart(1)[0]) if self.blocks.available else 0

    def _reclaim(self) -> None:
        """If there is no page, lets saved states of answers go until there is one, or will be."""
        while self._decoded and not self.blocks.available + self.blocks.settling:
            self._drop(self._decoded.pop(next(iter(self._decoded)))[1])

    def _drop(self, page: int) -> None:
        self.blocks.release(np.array([page], np.int32))

    def grow_ahead(self, rows: Slots, most: Int32s, seniority: NDArray[np.int64]) -> Int32s:
        """As `OtherGroups.grow_ahead`: one page is there for any number of tokens."""
        return most

    def take_back(self, slot: int, first: int, end: int, step: int) -> None:
        """Nothing: no step folds in tokens that may not count."""

    def table_of(self, slots: Int32s, starts: Int32s, contexts: Int32s, step: int) -> GroupTable:
        """The pages of a step's rows, which fold in tokens [start, context). Makes this step their
        last writer.

        Returns:
            A table of states.
        """
        reads, moved = self.page[slots], self._next[slots] > 0
        writes = np.where(moved, self._next[slots], reads)
        for slot, page in zip(slots[moved].tolist(), reads[moved].tolist(), strict=True):
            self.page[slot], self._next[slot], self._is_shared[slot] = self._next[slot], 0, False
            if page:
                self._left.append((step, page))
        saved = self._save(slots, starts, contexts)
        most = max((len(each) for each in saved.values()), default=0)
        table = np.zeros((len(slots), 2 + 2 * most), np.int32)
        table[:, 0], table[:, 1] = reads, writes
        for row, each in saved.items():
            table[row, 2 : 2 + 2 * len(each)] = [n for pair in each for n in pair]
        written = table[:, 1::2] if not most else np.concatenate([table[:, 1:2], table[:, 2::2]], 1)
        self.blocks.mark_written(written[written > 0], step)
        nothing = np.zeros(0, np.int32)
        return GroupTable(table, np.zeros(len(slots), np.int32), nothing, nothing)

    def _save(
        self, slots: Int32s, starts: Int32s, contexts: Int32s
    ) -> dict[int, list[tuple[int, int]]]:
        """Takes pages for the states that the rows of a step save: by row, (page, tokens). None is
        saved where there is no page."""
        saved: dict[int, list[tuple[int, int]]] = {}
        if not self._keeps:
            return saved
        decoded = np.flatnonzero((contexts % DECODED_TOKENS == 0) & (contexts - starts == 1))
        for row in decoded.tolist():
            slot, tokens = int(slots[row]), int(contexts[row])
            if slot not in self._wanted and (page := self._allocate()):
                if slot in self._decoded:
                    self._drop(self._decoded.pop(slot)[1])
                self._decoded[slot] = tokens, page
                saved[row] = [(page, tokens)]
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._wanted]
        for row in rows if self._wanted else ():
            slot, start, end = int(slots[row]), int(starts[row]), int(contexts[row])
            wanted = self._wanted[slot]
            for tokens in [each for each in wanted if start < each <= end]:
                if page := self._allocate():
                    self._of_prompts.setdefault(slot, []).append((tokens, page))
                    saved.setdefault(row, []).append((page, tokens))
            self._wanted[slot] = [each for each in wanted if each > end]
            if not self._wanted[slot]:
                del self._wanted[slot]
        return saved

    def settled(self, step: int) -> None:
        """A step and all before it are done, and read no pages any more. See
        `BlockManager.settle`."""
        while self._left and self._left[0][0] <= step:
            self._drop(self._left.pop(0)[1])

    def passed(self, slots: Slots | Int32s, num_tokens: Int32s) -> None:
        """A step has settled with which the sequences in these slots have so many tokens folded in.
        The states of prompts up to there have keys by now, and only the cache keeps them."""
        if not self._of_prompts:
            return
        for slot, end in zip(slots.tolist(), num_tokens.tolist(), strict=True):
            saved = self._of_prompts.pop(slot, [])
            for tokens, page in saved:
                if tokens <= end:
                    self._drop(page)
            if rest := [each for each in saved if each[0] > end]:
                self._of_prompts[slot] = rest

    # -- sequences --------------------------------------------------------------------------------

    def fork(self, leader: int, follower: int, length: int, spare: int | None, step: int) -> None:
        """The follower goes on from the leader's state. Both write another page than that."""
        page = self.page[leader : leader + 1]
        self.blocks.share(page)
        self.page[follower] = page[0]
        self._is_shared[[leader, follower]] = True

    def stored(self, table: GroupTable, rows: Int32s, position: int) -> PageIds:
        """See `OtherGroups.stored`."""
        pages: PageIds = table.pages[rows, 1]
        return pages

    def follow(self, own: Slots, those: Slots, full: int) -> None:
        """See `OtherGroups.follow`: the page of a slot is its own."""

    @property
    def has_copies(self) -> bool:
        """Whether copies wait for a step: never."""
        return False

    def pages(self, slot: int) -> GroupPages:
        """The pages of the sequence in `slot`, with the newest state's first."""
        saved = list(self._of_prompts.get(slot, []))
        saved += [self._decoded[slot]] if slot in self._decoded else []
        own = [int(page) for page in (self.page[slot], self._next[slot]) if page]
        pages = own + [page for _, page in saved]
        tokens = (0,) * len(own) + tuple(tokens for tokens, _ in saved)
        return GroupPages(0, np.array(pages, np.int32), tokens)

    def take(self, slot: int) -> GroupPages:
        """Takes the pages of a sequence that leaves its slot. The caller lets them go."""
        kept = self.pages(slot)
        self.page[slot] = self._next[slot] = 0
        self._is_shared[slot] = False
        for saved in (self._wanted, self._of_prompts, self._decoded):
            saved.pop(slot, None)
        return kept

    def keep(self, kept: GroupPages) -> None:
        """A transfer may use these pages, which have been taken."""
        self._kept += len(kept.pages)

    def release_kept(self, kept: GroupPages) -> None:
        """No transfer uses them any more."""
        self._kept -= len(kept.pages)
        self.blocks.release(kept.pages)

    def check(self) -> None:
        """Raises AssertionError if a slot may write a page that others may read."""
        for slot in np.flatnonzero(self.page).tolist():
            alone = self._is_shared[slot] or self.blocks.is_alone(int(self.page[slot]))
            assert alone, "a slot writes a state that others read"
        for page in self._next[self._next > 0].tolist():
            assert self.blocks.is_alone(page), "a slot writes a state that others read"

    @property
    def left_pages(self) -> PageIds:
        """Pages that steps in flight alone hold."""
        return np.array([page for _, page in self._left], np.int32)
