"""The index of a router: which worker holds which page, as far as the workers have reported.

A key has one integer, with two bits for each holder: it has the page in its pool, or in its host
tier. If the model has several groups of layers, a holder has two such bits for each group. Group 0
says what it *has* of a prompt. What it can *use* ends where the pages of the other groups allow a
prompt to go on: behind a window they must have the last few before that place.

Keys are spread over 1,024 dicts, because a dict is copied when it grows: one of a million keys
would hold the event loop for 33 ms. Nothing here takes longer than one shard does.

Life of a holder:

1. Joined: it gets a place, which is its lowest bit, and holds nothing.
2. Reported: `apply` and `clear`, both of which may be repeated.
3. Left: it is found no more. Its bits are swept later, a shard at a time. Its place is given to
   another only after that.

The index is bounded. When a shard is full, the eighth of its keys that came first is dropped. A key
that is missing here is a page that is thought to be nowhere, so at worst it is computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from prefixes.keys import ShortKeys

POOL: Final = 1
"""The page is in the KV pool."""
HOST: Final = 2
"""The page is in the host tier."""
BOTH: Final = POOL | HOST
GONE: Final = 4
"""Added to a tier: the page is there no more."""
GROUP: Final = 8
"""Added to a tier as often as the number of the page's group says."""
MOST_GROUPS: Final = 8
"""As in `kv_transfer.types`."""
SHARDS: Final = 1024
"""Shard of a key: its lowest ten bits. A power of two."""
MOST_KEYS: Final = 4_000_000
DROPPED_SHARE: Final = 8
"""A full shard loses this part of its keys at once: to search for the first again and again would
pass over all that are gone."""

_SHARD: Final = SHARDS - 1


class Held(NamedTuple):
    """The leading pages of a prompt that one worker has."""

    pool_pages: int
    """In its pool."""
    host_pages: int
    """In its pool or its host tier, each of them; at least `pool_pages`."""
    pool_resume: int
    """Pages of its pool behind which it can go on, given those of all groups there."""
    host_resume: int
    """Likewise of pool and host tier."""

    @classmethod
    def all(cls, pool: int, host: int) -> Held:
        """Pages of a model with one group: all of them are of use."""
        return cls(pool, host, pool, host)


class PrefixIndex:
    """See the module. Holders are known by name.

    Args:
        most_keys: the bound.
        resume_pages: for groups 1, 2, ... the pages right before a place that a holder needs to go
            on there.
    """

    def __init__(self, most_keys: int = MOST_KEYS, resume_pages: Sequence[int] = ()) -> None:
        self.groups = 1 + len(resume_pages)
        self._resume_pages = tuple(resume_pages)
        self._stride = 2 * self.groups
        """Bits of a holder."""
        self._whole = (1 << self._stride) - 1
        """All of them, of the first holder."""
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._get = [shard.get for shard in self._shards]
        """Look-up of each shard, to spare one."""
        self._most = max(DROPPED_SHARE, most_keys // SHARDS)
        self._places: dict[str, int] = {}
        """The lower bit of each holder."""
        self._counts: dict[str, list[int]] = {}
        """Keys in the pool and in the host tier, by holder."""
        self._leaving: dict[int, int] = {}
        """Places of holders that left, with the number of shards to be swept."""
        self._swept = 0
        self.dropped = 0
        """Keys dropped since the start, because the index was full."""

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    @property
    def holders(self) -> Sequence[str]:
        """Workers that have joined."""
        return tuple(self._places)

    def counts(self, holder: str) -> tuple[int, int]:
        """Keys that the holder has in its pool, and in its host tier."""
        pool, host = self._counts[holder]
        return pool, host

    def tiers(self, holder: str, key: int) -> int:
        """Where the holder has the page: POOL, HOST, BOTH or 0."""
        return self._shards[key & _SHARD].get(key, 0) >> self._places[holder] & BOTH

    # -- what holders report ----------------------------------------------------------------------

    def join(self, holder: str) -> None:
        """Takes a new holder in. One of that name leaves first."""
        self.leave(holder)
        taken = {*self._places.values(), *self._leaving}
        places = range(0, self._stride * (len(taken) + 1), self._stride)
        self._places[holder] = next(bit for bit in places if bit not in taken)
        self._counts[holder] = [0, 0]

    def leave(self, holder: str) -> None:
        """Forgets all that a holder has. `sweep` is due."""
        if (place := self._places.pop(holder, None)) is not None:
            self._leaving[place] = SHARDS
            del self._counts[holder]

    def apply(self, holder: str, keys: Iterable[int], kinds: bytes) -> None:
        """Pages came to a tier or left it, in order. A kind is POOL or HOST, with GONE added if the
        page left, and GROUP for each group before its own."""
        shards, gets, most = self._shards, self._get, self._most
        place = self._places[holder]
        kinds_of_all = range(GROUP * self.groups)
        bit_of = [(kind & BOTH) << place + kind // GROUP * 2 for kind in kinds_of_all]
        changes = [0] * len(kinds_of_all)
        for key, kind in zip(keys, kinds, strict=True):
            number = key & _SHARD
            old, bit = gets[number](key, 0), bit_of[kind]
            if not kind & GONE:
                if old & bit:
                    continue
                shard = shards[number]
                if not old and len(shard) >= most:
                    self._drop(shard)
                shard[key] = old | bit
            elif not old & bit:
                continue
            elif old == bit:
                del shards[number][key]
            else:
                shards[number][key] = old ^ bit
            changes[kind] += 1
        for tier in (POOL, HOST):
            self._counts[holder][tier - 1] += changes[tier] - changes[tier | GONE]

    def clear(self, holder: str, first: int, end: int) -> None:
        """The holder has none of the pages of these shards."""
        if self.groups > 1 or any(self._counts[holder]):
            bits = self._whole << self._places[holder]
            for shard in self._shards[first:end]:
                self._uncount(_without(shard, bits))

    def sweep(self) -> bool:
        """Sweeps one shard. Returns whether more is to be swept."""
        if not self._leaving:
            return False
        _without(self._shards[self._swept], sum(self._whole << place for place in self._leaving))
        self._swept = (self._swept + 1) % SHARDS
        left = ((place, shards - 1) for place, shards in self._leaving.items())
        self._leaving = {place: shards for place, shards in left if shards}
        return bool(self._leaving)

    def _drop(self, shard: dict[int, int]) -> None:
        """Drops the keys that came first."""
        first = list(islice(shard.items(), len(shard) // DROPPED_SHARE))
        for key, _ in first:
            del shard[key]
        self.dropped += len(first)
        self._uncount([bits for _, bits in first])

    def _uncount(self, gone: Sequence[int]) -> None:
        """Bits of keys that are gone. Each bit costs, and not each holder for each key."""
        counts_at = {place: self._counts[holder] for holder, place in self._places.items()}
        for bits, keys in Counter(gone).items():
            left = bits
            while left:
                number = (left & -left).bit_length() - 1
                left &= left - 1
                tier = number % self._stride
                if tier < HOST and (counts := counts_at.get(number - tier)):
                    counts[tier] -= keys

    # -- what the router asks ---------------------------------------------------------------------

    def held(self, keys: ShortKeys) -> dict[str, Held]:
        """The leading pages of a prompt, by holder. Those that hold none are left out. It ends at
        the first page that nobody holds."""
        gets, last = self._get, -1
        pool = any_tier = sum(POOL << place for place in self._places.values())
        if not any_tier:
            return {}
        runs: list[tuple[int, int, int]] = []
        """Where fewer hold the pages: depth, and who still has all of them in either way."""
        changes: list[tuple[int, int]] = []
        """Where a key's bits differ from those before: depth and bits."""
        depth = 0
        for depth, key in enumerate(keys.tolist()):
            bits = gets[key & _SHARD](key, 0)
            if bits == last:
                continue
            last = bits
            changes.append((depth, bits))
            was = pool, any_tier
            pool &= bits
            any_tier &= bits | bits >> 1
            if (pool, any_tier) != was:
                runs.append((depth, was[0] & ~pool, was[1] & ~any_tier))
                if not any_tier:
                    break
        runs.append((len(keys), pool, any_tier))
        return self._by_holder(runs, changes)

    def _by_holder(
        self, runs: Sequence[tuple[int, int, int]], changes: Sequence[tuple[int, int]]
    ) -> dict[str, Held]:
        found = {}
        for holder, place in self._places.items():
            pool = next((depth for depth, lost, _ in runs if lost >> place & POOL), 0)
            host = next((depth for depth, _, lost in runs if lost >> place & POOL), 0)
            if host:
                resume = (
                    self._resume(changes, place, most, tiers)
                    for most, tiers in ((pool, POOL), (host, BOTH))
                )
                found[holder] = Held(pool, host, *resume)
        return found

    def _resume(self, changes: Sequence[tuple[int, int]], place: int, most: int, tiers: int) -> int:
        """The most leading pages, up to `most`, behind which a holder can go on with what it has in
        these tiers."""
        settled = -1
        while settled != most:
            settled = most
            for group, needed in enumerate(self._resume_pages, 1):
                mask = tiers << place + 2 * group
                most = _resumable(changes, mask, most, needed)
        return most


def _resumable(changes: Sequence[tuple[int, int]], mask: int, most: int, needed: int) -> int:
    """The deepest place up to `most` right before which `needed` pages, or all of them, have a bit
    of the mask. The bits change at the depths of `changes`."""
    run, end, behind = 0, most, most
    for depth, bits in reversed(changes):
        if depth >= behind or run >= needed:
            continue
        if bits & mask:
            run += behind - depth
        else:
            run, end = 0, depth
        behind = depth
    return end


def _without(shard: dict[int, int], bits: int) -> list[int]:
    """Takes bits from all keys of a shard. Returns those that were set."""
    found = [(key, held) for key, held in shard.items() if held & bits]
    for key, held in found:
        if rest := held & ~bits:
            shard[key] = rest
        else:
            del shard[key]
    return [held & bits for _, held in found]
