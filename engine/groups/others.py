"""All groups of layers beyond group 0, behind one object.

The scheduler plans by the pages of group 0. Before it admits or grows a sequence it asks this
object, which asks each group with a window or with states. It returns the strictest answer, or the
answers by group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from engine.bounds import Bounds
from engine.group_pages import GroupGrant, GroupPages
from engine.groups.spec import Full, Kind, State, Window, name_of
from engine.groups.state import StatePages
from engine.groups.window import Slots, WindowPages
from engine.loads import GroupLoad
from engine.pages.blocks import BlockManager
from engine.step.plan import GroupTable, Int32s
from engine.types import PageIds

AllKept = tuple[GroupPages, ...]
"""By group: the pages of a sequence that has left its slot."""
Spares = tuple[PageIds, ...]
"""By group: pages for copies of the partial page at which choices diverge. State groups have
none."""
OtherPages = WindowPages | StatePages
"""The pages of one group beyond group 0."""


class OtherGroups:
    """All groups but group 0. A model whose layers all see all tokens has none. A model without
    layers that see all tokens has at least one, and its group 0 has no layers."""

    def __init__(self, groups: Sequence[OtherPages] = ()) -> None:
        self.groups = tuple(groups)
        self.has_states = any(isinstance(group, StatePages) for group in groups)

    def __bool__(self) -> bool:
        return bool(self.groups)

    def load(self, first: BlockManager) -> tuple[GroupLoad, ...]:
        """The pages of all groups, of which `first` is group 0; none where it is the only one."""
        if not self.groups:
            return ()
        books = [(name_of(Full()), first), *((one.name, one.blocks) for one in self.groups)]
        return tuple(
            GroupLoad(name, blocks.total, blocks.free, blocks.evictable) for name, blocks in books
        )

    # -- admission --------------------------------------------------------------------------------

    def can_ever_hold(self, sequences: int, final_pages: int) -> bool:
        """Whether `sequences` sequences fit when nothing else is held. Each ends with `final_pages`
        pages in group 0."""
        return all(group.can_ever_hold(sequences, final_pages) for group in self.groups)

    def has_room(self, sequences: int, pages_each: int, final_pages: Int32s) -> bool:
        """Whether `sequences` more sequences fit beside the running ones. Each ends with
        `pages_each` pages in group 0. `final_pages`: by slot, those of each running one."""
        return all(group.has_room(sequences, pages_each, final_pages) for group in self.groups)

    def free_sequences(self, most: int, final_pages: Int32s) -> int:
        """How many more sequences of unbounded length fit, at most `most`. `final_pages`: of
        running ones."""
        return min([most, *(group.free_sequences(final_pages) for group in self.groups)])

    def room(self, final_pages: Int32s) -> list[int]:
        """By group, pages that are not promised to a sequence. `final_pages`: of running ones."""
        return [group.room(final_pages) for group in self.groups]

    def resumable(
        self, keys: Sequence[bytes], most: int, has: Sequence[Callable[[bytes], bool]] = ()
    ) -> int:
        """The longest prefix of the prompt, at most `most` pages, at whose end every group can
        resume. One group may shorten what another allows, so they are asked until none does.
        `has`: by group, whether a page is found elsewhere, such as in host memory."""
        settled = -1
        while settled != most:
            settled = most
            for group, where in zip_longest(self.groups, has):
                most = group.resumable(keys, most, where)
        return most

    def begins(self, cached: int) -> list[int]:
        """By group, index of the first page that is needed to resume behind `cached` pages."""
        return [group.begins(cached) for group in self.groups]

    def count_lent(self, lent: Callable[[int], int]) -> None:
        """Counts more pages as promised: those that are held here for loads from tiers, and for
        fetches from and by peers. `lent` returns how many they are, given the number of a group,
        from 1 on."""
        for number, group in enumerate(self.groups, 1):
            group.lenders.append(partial(lent, number))

    def begin(self, slot: int, keys: Sequence[bytes], cached: int, known: int) -> None:
        """The prompt in `slot` resumes behind its first `cached` pages. `known`: pages of it that
        group 0 had cached."""
        for group in self.groups:
            group.begin(slot, keys, cached, known)

    def can_reserve(self, num_tokens: int, spares: int) -> bool:
        """Whether pages for so many tokens, and so many spare ones, are there now. A promised page
        may not be free yet: a step in flight may use it."""
        return all(group.can_reserve(num_tokens, spares) for group in self.groups)

    def reserve(self, slot: int, num_tokens: int, keys: Sequence[bytes]) -> tuple[GroupGrant, ...]:
        """Pages for a prompt that another worker computes."""
        return tuple(group.reserve(slot, num_tokens, keys) for group in self.groups)

    def allocate_spares(self, count: int) -> Spares:
        """Pages for copies of a partial page."""
        return tuple(group.allocate_spares(count) for group in self.groups)

    def release_spares(self, spares: Spares) -> None:
        """Nobody needs them."""
        for group, pages in zip(self.groups, spares, strict=False):
            group.blocks.release(pages)

    # -- steps ------------------------------------------------------------------------------------

    def most_end(self, slot: int, end: int, final_pages: Int32s) -> int:
        """The longest prefix, in tokens and at most `end`, of the prompt in `slot` that can get
        pages of every group now."""
        return min([end, *(group.most_end(slot, final_pages) for group in self.groups)])

    def extend(self, slot: int, end_token: int) -> None:
        """Gives the prompt in `slot` pages up to `end_token`."""
        for group in self.groups:
            group.extend(slot, end_token)

    def grow(self, rows: Slots, kv_len: Int32s, seniority: NDArray[np.int64]) -> Slots:
        """Allocates the pages of the next token of decode rows. Returns the rows that got theirs;
        the others wait for the step in flight. Arguments are by row."""
        waiting = [group.grow(rows, kv_len, seniority) for group in self.groups]
        if not any(one.size for one in waiting):  # The usual case.
            return rows
        return np.setdiff1d(rows, np.concatenate(waiting))

    def grow_ahead(self, rows: Slots, most: Int32s, seniority: NDArray[np.int64]) -> Int32s:
        """Gives decode rows pages for drafts up to `most` tokens. Returns up to how many each may
        store. Arguments are by row."""
        for group in self.groups:
            most = group.grow_ahead(rows, most, seniority)
        return most

    def tables(
        self, slots: Int32s, starts: Int32s, contexts: Int32s, step: int
    ) -> tuple[GroupTable, ...]:
        """The pages of a step's rows. See `WindowPages.table_of`."""
        if not self.groups:
            return ()
        return tuple(group.table_of(slots, starts, contexts, step) for group in self.groups)

    def take_back(self, slot: int, first: int, end: int, step: int) -> None:
        """The pages [first, end) of a sequence were written by `step` last, and not by the one in
        flight."""
        for group in self.groups:
            group.take_back(slot, first, end, step)

    def settle(self, step: int) -> None:
        """See `BlockManager.settle`."""
        for group in self.groups:
            group.blocks.settle(step)
            group.settled(step)

    def passed(self, slots: Slots | Int32s, num_tokens: Int32s) -> None:
        """See `WindowPages.passed`."""
        for group in self.groups:
            group.passed(slots, num_tokens)

    @property
    def has_copies(self) -> bool:
        """Whether copies wait for a step."""
        return any(group.has_copies for group in self.groups)

    # -- sequences --------------------------------------------------------------------------------

    def fork(
        self, leader: int, follower: int, length: int, spares: Spares, at: int, step: int
    ) -> None:
        """See `WindowPages.fork`. `at`: the place of the follower's spare page; no `spares`: the
        last page is full."""
        for index, group in enumerate(self.groups):
            spare = int(spares[index][at]) if spares and spares[index].size else None
            group.fork(leader, follower, length, spare, step)

    def stored(self, tables: Sequence[GroupTable], rows: Int32s, position: int) -> list[PageIds]:
        """By group, the pages into which these rows of a step store `position`. A window's are
        none if the position fills its page: the next step stores into another one."""
        pairs = zip(self.groups, tables, strict=True)
        return [group.stored(table, rows, position) for group, table in pairs]

    def follow(self, own: Slots, those: Slots, full: int) -> None:
        """The sequence in each slot goes on from the first `full` pages of another one's."""
        for group in self.groups:
            group.follow(own, those, full)

    def pages(self, slot: int) -> AllKept:
        """The pages of the sequence in `slot`."""
        return tuple(group.pages(slot) for group in self.groups)

    def take(self, slot: int) -> AllKept:
        """Takes the pages of a sequence that leaves its slot."""
        return tuple(group.take(slot) for group in self.groups)

    def keep(self, kept: AllKept) -> None:
        """A transfer may use these pages, which were taken."""
        for group, own in zip(self.groups, kept, strict=True):
            group.keep(own)

    def release_kept(self, kept: AllKept) -> None:
        """No transfer uses them any more."""
        for group, own in zip(self.groups, kept, strict=False):
            group.release_kept(own)

    def release(self, kept: AllKept) -> None:
        """Lets pages go that were taken."""
        for group, own in zip(self.groups, kept, strict=True):
            group.blocks.release(own.pages)

    def publish(self, kept: AllKept, keys: Sequence[bytes]) -> None:
        """Keys the complete pages among these. `keys` are those of the sequence."""
        for group, own in zip(self.groups, kept, strict=True):
            group.publish(own, keys)

    def inspect(self) -> None:
        """See `BlockManager.inspect`."""
        for group in self.groups:
            group.blocks.inspect()


def other_groups(
    config: Bounds, kinds: Sequence[Kind], managers: Sequence[BlockManager]
) -> OtherGroups:
    """The groups beyond group 0, each with the manager of its pages."""
    return OtherGroups(
        [_pages_of(config, kind, blocks) for kind, blocks in zip(kinds, managers, strict=True)]
    )


def _pages_of(config: Bounds, kind: Kind, blocks: BlockManager) -> OtherPages:
    if isinstance(kind, State):
        return StatePages(config, kind, blocks)
    assert isinstance(kind, Window), "one group alone keeps all tokens"
    return WindowPages(config, kind, blocks)
