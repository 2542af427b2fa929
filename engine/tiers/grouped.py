"""Host tiers of a model with several groups of layers: a resume point comes whole, or not at all.

Each group has slots, lanes and saves of its own, and saves what it would evict. A prompt goes on
behind a page only if group 0 has all pages before it and each window the last of them. So a load
looks for the deepest such place in pool and host memory together, and brings what is missing up to
there, of all groups. Its request waits until the last of it is there. If a part fails, the rest is
in the cache all the same, and the rule for hits says where the prompt goes on.

With stores below the host tiers, each group has stores of its own (`engine.tiers.stores.seeking`).

Pages that wait for others are held. Those of a window are counted among what its sequences were
promised, so a load begins only where that leaves room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.groups.others import OtherGroups
from engine.loads import TierLoad
from engine.pages.prefix import ReportPages
from engine.tiers.loading import Looked
from engine.tiers.protocol import Wait
from engine.tiers.stores.seeking import GroupSeek, GroupSeeks
from engine.tiers.tiers import HostTiers
from engine.types import PageIds


class _GroupWait(NamedTuple):
    """What a request waits for in a group beyond the first."""

    tiers: HostTiers
    wait: Wait


_GATE = object()
"""Keeps a part's pages held until all parts of the request are there."""


class GroupedTiers:
    """See the module. It belongs to the step loop's thread.

    Args:
        first: the tiers of group 0.
        others: those of the other groups.
        groups: the other groups, in the same order.
    """

    on = True

    def __init__(self, first: HostTiers, others: Sequence[HostTiers], groups: OtherGroups) -> None:
        self._first = first
        self._others = tuple(others)
        self._groups = groups
        self._all = (first, *others)
        self._parts: dict[Wait, list[_GroupWait]] = {}
        self._seeks = GroupSeeks(self._all, groups, self._sought)
        groups.count_lent(lambda group: self._all[group].count_held())

    def wakes(self, wake: Callable[[], None]) -> None:
        """See `PageTiers`."""
        for tiers in self._all:
            tiers.wakes(wake)

    def turn(self) -> None:
        """See `PageTiers`."""
        for tiers in self._all:
            tiers.turn()
        for wait in list(self._parts):
            self._settle(wait)

    def begin(
        self,
        keys: Sequence[bytes],
        room: int,
        queued_tokens: int,
        others_room: Sequence[int] = (),
    ) -> Wait | None:
        """See `PageTiers`."""
        end, rooms = self._reachable(keys), (room, *others_room)
        looked, seeks = self._look(keys, end), self._seeks.has_objects(keys, end)
        is_here = all(one.is_here for one in looked)
        if is_here and not seeks:
            return Wait()
        gained = (end - self._resumable(keys)) * self._first.page_tokens
        missing = [len(one.missing) for one in looked]
        if not is_here and (gained <= 0 or not self._is_worth_it(missing, queued_tokens + gained)):
            return Wait()
        if not self._has_room(looked, rooms):
            return None
        wait = Wait()
        self._start(wait, looked)
        if seeks:
            available = [tiers.available_pages for tiers in self._all]
            kept_back = [own - most for own, most in zip(available, rooms, strict=True)]
            self._seeks.begin(GroupSeek(keys, queued_tokens, wait, kept_back), end)
        self._settle(wait)
        return wait

    def _sought(self, whole: GroupSeek) -> None:
        """What comes from stores for a prompt has come."""
        looked = self._look(whole.keys, self._reachable(whole.keys))
        available = [tiers.available_pages for tiers in self._all]
        rooms = [own - kept for own, kept in zip(available, whole.kept_back, strict=True)]
        if not any(tiers.is_late for tiers in self._all) and self._has_room(looked, rooms):
            self._start(whole.wait, looked)
        self._settle(whole.wait)

    def preempted(self, pages: PageIds) -> None:
        """See `PageTiers`. Those of windows stay in the cache, and are saved before others get
        them, or not."""
        self._first.preempted(pages)

    def published(self, keys: Sequence[bytes], first: int) -> None:
        """See `PageTiers`."""
        for tiers in self._all:
            tiers.published(keys, first)

    def drop(self, key: bytes, group: int) -> None:
        """See `PageTiers`."""
        self._all[group].drop(key, group)

    def report_pages(self, report: ReportPages) -> None:
        """See `PageTiers`."""
        for group, tiers in enumerate(self._all):
            tiers.report_pages(report, group)

    def note_rate(self, tokens_per_s: float) -> None:
        """See `PageTiers`."""
        self._first.note_rate(tokens_per_s)

    @property
    def leaving_pages(self) -> int:
        """See `PageTiers`."""
        return self._first.leaving_pages

    def wait_s(self, most_s: float) -> float:
        """See `PageTiers`."""
        return min(tiers.wait_s(most_s) for tiers in self._all)

    def load(self) -> TierLoad:
        """See `PageTiers`. Slots and rates are those of group 0, bytes and failures of all."""
        first, *others = (tiers.load() for tiers in self._all)
        late, moved = Counter(first.late), Counter(first.bytes_moved)
        for load in others:
            late.update(load.late)
            moved.update(load.bytes_moved)
        return replace(first, late=late, bytes_moved=dict(moved))

    def add_holders(self, holders: NDArray[np.int32], group: int = 0) -> None:
        """See `PageTiers`."""
        self._all[group].add_holders(holders)

    def stop(self) -> None:
        """See `PageTiers`."""
        for tiers in self._all:
            tiers.stop()

    def is_coming(self, key: bytes, group: int = 0) -> bool:
        """See `PageTiers`."""
        return self._all[group].is_coming(key)

    def fetched(self, wait: Wait) -> None:
        """See `PageTiers`."""
        self._settle(wait)

    def bring(self, keys: Sequence[Sequence[bytes]], rooms: Sequence[int]) -> Wait:
        """See `PageTiers`."""
        looked = [tiers.look(own) for tiers, own in zip(self._all, keys, strict=True)]
        is_whole = all(one.total == len(own) for one, own in zip(looked, keys, strict=True))
        is_here = all(one.is_here for one in looked)
        if not is_whole or is_here or any(tiers.is_late for tiers in self._all):
            return Wait()
        wait = Wait()
        if self._has_room(looked, rooms):
            self._start(wait, looked)
            self._settle(wait)
        return wait

    def _has_room(self, looked: Sequence[Looked], rooms: Sequence[int]) -> bool:
        wanted = zip(self._all, looked, rooms, strict=True)
        return all(tiers.has_room(one, room) for tiers, one, room in wanted)

    def _start(self, wait: Wait, looked: Sequence[Looked]) -> None:
        """Lets come what was looked for, by group."""
        parts = [_GroupWait(tiers, Wait({_GATE})) for tiers in self._others]
        for part, one in zip(parts, looked[1:], strict=True):
            part.tiers.start(part.wait, one)
            wait.under_way.add(part)
        self._parts.setdefault(wait, []).extend(parts)
        self._first.start(wait, looked[0])

    def _reachable(self, keys: Sequence[bytes]) -> int:
        """The most leading pages behind which a prompt could go on, if all came that can."""
        has = [tiers.has for tiers in self._others]
        return self._groups.resumable(keys, self._first.count_leading(keys), has)

    def _resumable(self, keys: Sequence[bytes]) -> int:
        """The most leading pages behind which it could go on with what is in the pool."""
        return self._groups.resumable(keys, self._first.count_cached(keys))

    def _look(self, keys: Sequence[bytes], end: int) -> list[Looked]:
        looked = [self._first.look(keys[:end])]
        for tiers, begin in zip(self._others, self._groups.begins(end), strict=True):
            looked.append(tiers.look(keys[begin:end]))
        return looked

    def _is_worth_it(self, missing: Sequence[int], tokens: int) -> bool:
        """Copies of groups share one way to the pool, so they take as long as one behind the
        other."""
        seconds = [tiers.expected_s(pages) for tiers, pages in zip(self._all, missing, strict=True)]
        is_late = any(tiers.is_late for tiers in self._all)
        return self._first.is_worth_it(sum(seconds), tokens, is_late=is_late)

    def _settle(self, wait: Wait) -> None:
        """Ends what has ended, and lets the pages of all parts go once the request may go on."""
        parts = self._parts.get(wait)
        if parts is not None:
            for part in parts:
                if part.wait.under_way == {_GATE}:
                    wait.under_way.discard(part)
            if wait.is_over:
                del self._parts[wait]
                for part in parts:
                    part.wait.under_way.clear()
                    part.tiers.fetched(part.wait)
        self._first.fetched(wait)
