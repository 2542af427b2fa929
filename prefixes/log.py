"""A worker's own record of its pages: the latest events, and all pages that can be found now.

A router that missed events gets them again from the ring of the latest 65,536. One that missed more
gets all pages, shard by shard. Events go on meanwhile: a part says which event it contains last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np

from prefixes.codec import MOST_BYTES, MOST_EVENTS, MOST_IN_PART, Events, ShardSnapshot
from prefixes.index import BOTH, GONE, GROUP, SHARDS
from prefixes.keys import SHORT_BYTES, short_keys

RING: Final = 65_536
"""Events that are kept."""
_SHARD: Final = SHARDS - 1
_MOST_FIT: Final = MOST_BYTES // (SHORT_BYTES + 1)


class PageLog:
    """See the module. Belongs to one thread.

    Args:
        size: of the ring.
        most_events: in a message.
        most_in_part: keys in a part of a snapshot, if its first shard has no more.
    """

    def __init__(
        self,
        size: int = RING,
        most_events: int = MOST_EVENTS,
        most_in_part: int = MOST_IN_PART,
    ) -> None:
        self.end = 1
        """Number of the next event."""
        self._size = size
        self._most_events = most_events
        self._most_in_part = most_in_part
        self._keys = np.zeros(size, "<u8")
        self._kinds = np.zeros(size, np.uint8)
        self._groups: list[list[dict[int, int]]] = []
        """By group and shard, tiers by key."""

    @property
    def first(self) -> int:
        """Number of the oldest event in the ring; `end` if there is none."""
        return max(1, self.end - self._size)

    def write(self, keys: Sequence[bytes], kinds: bytes) -> None:
        """Pages came to a tier or left it, in order. Kinds are as for `PrefixIndex.apply`."""
        shorts = short_keys(keys)
        self._apply(shorts.tolist(), kinds)
        latest = min(len(kinds), self._size)
        self.end += len(kinds)
        places = np.arange(self.end - latest, self.end) % self._size
        self._keys[places] = shorts[len(kinds) - latest :]
        self._kinds[places] = np.frombuffer(kinds, np.uint8)[len(kinds) - latest :]

    def _apply(self, shorts: list[int], kinds: bytes) -> None:
        while len(self._groups) <= max(kinds, default=0) // GROUP:
            self._groups.append([{} for _ in range(SHARDS)])
        for key, kind in zip(shorts, kinds, strict=True):
            shard = self._groups[kind // GROUP][key & _SHARD]
            old, tier = shard.get(key, 0), kind & BOTH
            tiers = old & ~tier if kind & GONE else old | tier
            if tiers:
                shard[key] = tiers
            elif old:
                del shard[key]

    def events(self, first: int) -> Events:
        """The events from number `first` on, which is in the ring, as many as a message has."""
        places = np.arange(first, min(self.end, first + self._most_events)) % self._size
        return Events(first, self._keys[places].tobytes(), self._kinds[places].tobytes())

    def part(self, first_shard: int) -> ShardSnapshot:
        """All pages in the shards from `first_shard` on, as many shards as fit into a message. Of
        a shard that does not fit, the router's index would drop the rest anyway."""
        end, count = first_shard + 1, self._count(first_shard)
        while end < SHARDS and count + self._count(end) <= self._most_in_part:
            count += self._count(end)
            end += 1
        keys, tiers = [], []
        for group, every in enumerate(self._groups):
            shards = every[first_shard:end]
            keys.append(np.fromiter(chain.from_iterable(shards), "<u8"))
            held = bytes(chain.from_iterable(shard.values() for shard in shards))
            tiers.append(np.frombuffer(held, np.uint8) + np.uint8(GROUP * group))
        if not keys:
            return ShardSnapshot(self.end - 1, first_shard, end, b"", b"")
        columns = np.concatenate(keys)[:_MOST_FIT], np.concatenate(tiers)[:_MOST_FIT]
        return ShardSnapshot(
            self.end - 1, first_shard, end, *(column.tobytes() for column in columns)
        )

    def tiers(self, group: int = 0) -> dict[int, int]:
        """All pages of a group that can be found: short key and tiers."""
        shards = self._groups[group] if group < len(self._groups) else ()
        return {key: tiers for shard in shards for key, tiers in shard.items()}

    def _count(self, shard: int) -> int:
        return sum(len(shards[shard]) for shards in self._groups)
