"""A worker's own record of its pages: the latest events, and all pages that can be found now.

A router that missed events gets them again from the ring of the latest 65,536. One that missed more
gets all pages, shard by shard. Events go on meanwhile: a part says which event it contains last.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from prefixes.codec import MOST_BYTES, MOST_KEYS, Events, Part
from prefixes.index import GONE, SHARDS
from prefixes.keys import SHORT_BYTES, short_key

RING: Final = 65_536
"""Events that are kept."""
_MOST_IN_PART: Final = MOST_BYTES // (SHORT_BYTES + 1)


class PageLog:
    """See the module. Belongs to one thread.

    Args:
        size: of the ring.
        most_keys: in a message.
    """

    def __init__(self, size: int = RING, most_keys: int = MOST_KEYS) -> None:
        self.end = 1
        """Number of the next event."""
        self._size = size
        self._most_keys = most_keys
        self._keys = np.zeros(size, "<u8")
        self._kinds = np.zeros(size, np.uint8)
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        """Tiers by key."""

    @property
    def first(self) -> int:
        """Number of the oldest event in the ring; `end` if there is none."""
        return max(1, self.end - self._size)

    def write(self, kind: int, keys: Iterable[bytes]) -> None:
        """Pages came to a tier (POOL, HOST), or left it (with GONE added)."""
        shorts = [short_key(key) for key in keys]
        self._apply(kind, shorts)
        latest = np.array(shorts[-self._size :], np.uint64)
        self.end += len(shorts)
        places = np.arange(self.end - latest.size, self.end) % self._size
        self._keys[places] = latest
        self._kinds[places] = kind

    def _apply(self, kind: int, shorts: list[int]) -> None:
        tier = kind & ~GONE
        for key in shorts:
            shard = self._shards[key % SHARDS]
            old = shard.get(key, 0)
            tiers = old & ~tier if kind & GONE else old | tier
            if tiers:
                shard[key] = tiers
            elif old:
                del shard[key]

    def events(self, first: int) -> Events:
        """Those from number `first` on, which is in the ring, as many as a message has."""
        places = np.arange(first, min(self.end, first + self._most_keys)) % self._size
        return Events(first, self._keys[places].tobytes(), self._kinds[places].tobytes())

    def part(self, first_shard: int) -> Part:
        """All pages in the shards from `first_shard` on, as many shards as fit into a message. Of
        a shard that does not fit, the router's index would drop the rest anyway."""
        end, count = first_shard + 1, len(self._shards[first_shard])
        while end < SHARDS and count + len(self._shards[end]) <= self._most_keys:
            count += len(self._shards[end])
            end += 1
        pages = [page for shard in self._shards[first_shard:end] for page in shard.items()]
        columns = np.array(pages[:_MOST_IN_PART], np.uint64).reshape(-1, 2)
        keys, tiers = columns[:, 0].astype("<u8"), columns[:, 1].astype(np.uint8)
        return Part(self.end - 1, first_shard, end, keys.tobytes(), tiers.tobytes())

    def tiers(self) -> dict[int, int]:
        """All pages that can be found: short key and tiers."""
        return {key: tiers for shard in self._shards for key, tiers in shard.items()}
