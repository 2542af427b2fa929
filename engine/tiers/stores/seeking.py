"""A resume point of several groups in stores: where it is, and that it comes whole.

Each group has stores of its own, whose objects end every 256 tokens. So a prompt can go on
behind an object of group 0, if all objects of group 0 up to there are in a store or their pages
here, and so are those of each other group that have a page which it needs there.

    ASKED: the stores of all groups -> the deepest such place is chosen, if it is sooner than to
    compute up to there -> FETCHED: the objects are read into slots -> the owner loads them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.groups.others import OtherGroups
from engine.tiers.fetching import Seek
from engine.tiers.protocol import Wait
from engine.tiers.stores.process import StoreProcess
from engine.tiers.tiers import HostTiers


class _Chosen(NamedTuple):
    """What comes of one group: objects [first, end) of its seek."""

    process: StoreProcess
    first: int
    end: int


@dataclass(eq=False, slots=True)
class GroupSeek:
    """A prompt whose resume point is sought."""

    keys: Sequence[bytes]
    queued_tokens: int
    wait: Wait
    kept_back: Sequence[int]
    """By group, pages that the prompt must leave in the pool."""
    seeks: list[Seek] = field(default_factory=list)
    """By group."""
    asked: set[Seek] = field(default_factory=set)
    open: set[Seek] = field(default_factory=set)


class GroupSeeks:
    """The `Seeker` of all groups. It belongs to the step loop's thread.

    Args:
        tiers: by group.
        others: groups 1, 2, ...
        sought: called when nothing more comes.
    """

    def __init__(
        self,
        tiers: Sequence[HostTiers],
        others: OtherGroups,
        sought: Callable[[GroupSeek], None],
    ) -> None:
        self._tiers = tiers
        self._others = others
        self._sought = sought
        self._of: dict[Seek, GroupSeek] = {}
        for each in tiers:
            each.seeker = self

    def has_objects(self, keys: Sequence[bytes], known: int) -> bool:
        """Whether there are stores, and an object of a prompt behind its first `known` pages."""
        stores = self._tiers[0].stores
        return stores is not None and bool(stores.seek(keys, known))

    def begin(self, whole: GroupSeek, known: int) -> None:
        """Asks the stores of all groups what they have behind the first `known` pages."""
        for tiers in self._tiers:
            stores = tiers.stores
            assert stores is not None
            objects = stores.seek(whole.keys, known)
            first = len(whole.keys) // stores.stride - len(objects)
            seek = Seek(whole.keys, first, objects, whole.queued_tokens, 0, Wait())
            whole.seeks.append(seek)
            if not stores.begin(seek):
                return  # What the others answer is of no use.
        for seek in whole.seeks:
            self._of[seek] = whole
        whole.asked, whole.open = set(whole.seeks), set(whole.seeks)
        whole.wait.under_way.add(whole)

    def found(self, seek: Seek) -> None:
        """See `Seeker`."""
        if (whole := self._of.get(seek)) is None:
            return
        whole.asked.discard(seek)
        if whole.asked:
            return
        chosen = self._choose(whole)
        for tiers, each, part in zip(self._tiers, whole.seeks, chosen, strict=False):
            if part.end > part.first and tiers.stores is not None:
                tiers.stores.fetch(part.process, each, part.first, part.end)
        for each in list(whole.open):
            if each is not seek and not each.fetches:
                self.sought(each)

    def sought(self, seek: Seek) -> None:
        """See `Seeker`."""
        whole = self._of.get(seek)
        if whole is None or whole.asked:
            return
        del self._of[seek]
        whole.open.discard(seek)
        if not whole.open:
            whole.wait.under_way.discard(whole)
            self._sought(whole)

    def _choose(self, whole: GroupSeek) -> list[_Chosen]:
        """The objects of each group up to the deepest place; none if there is no such place, or to
        compute up to there is sooner."""
        first, *others = whole.seeks
        process, most = first.leading()
        for count in range(most, 0, -1):
            assert process is not None
            parts = [_Chosen(process, 0, count)]
            end = (first.first + count) * self._stride
            begins = self._others.begins(end)
            for tiers, seek, begin in zip(self._tiers[1:], others, begins, strict=True):
                part = self._part(tiers, seek, begin, end)
                if part is None:
                    break
                parts.append(part)
            else:
                return parts if self._is_sooner(whole, parts, count) else []
        return []

    @property
    def _stride(self) -> int:
        """Pages from the end of an object to that of the next."""
        assert self._tiers[0].stores is not None
        return self._tiers[0].stores.stride

    def _part(self, tiers: HostTiers, seek: Seek, begin: int, end: int) -> _Chosen | None:
        """The objects that bring pages [begin, end) of a group, but for those that are here; None:
        some can be had nowhere."""
        size = self._stride
        here = seek.first * size
        if not all(tiers.has(key) for key in seek.keys[begin : min(here, end)]):
            return None
        start, stop = max(0, begin // size - seek.first), end // size - seek.first
        if begin == end:
            start = stop
        for process, flags in seek.found.items():
            if len(flags) >= stop and all(flags[start:stop]):
                return _Chosen(process, start, stop)
        return None

    def _is_sooner(self, whole: GroupSeek, parts: Sequence[_Chosen], count: int) -> bool:
        seconds = 0.0
        for tiers, part in zip(self._tiers, parts, strict=True):
            assert tiers.stores is not None
            objects = part.end - part.first
            pages = objects * tiers.stores.pages
            seconds += part.process.expected_s(objects) + tiers.expected_s(pages)
        first = self._tiers[0]
        tokens = whole.queued_tokens + count * self._stride * first.page_tokens
        return first.is_sooner(seconds, tokens)
