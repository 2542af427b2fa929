"""What workers and routers send each other about pages, as plain bytes.

Two columns: short keys, 8 bytes each, little-endian; and a byte for each key. In events the byte is
a tier, with GONE added if the page left it. In a part of a snapshot it is the tiers of the page. To
both GROUP is added for each group before that of the page.
"""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import numpy as np

from prefixes.index import BOTH, GONE, GROUP, HOST, POOL, SHARDS
from prefixes.keys import SHORT_BYTES, ShortKeys

MOST_BYTES: Final = 65_536
"""Most bytes of both columns of a message."""
MOST_EVENTS: Final = 512
"""Events in the messages that are sent: a router takes less than a millisecond for them."""
MOST_IN_PART: Final = 2048
"""Keys in the parts that are sent. They take about one, since they lie in few shards."""
_KINDS: Final = (POOL, HOST, POOL | GONE, HOST | GONE)
_TIERS: Final = (POOL, HOST, BOTH)


class MalformedPagesError(Exception):
    """A message is not what it should be. `reason` is a short stable word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Events(NamedTuple):
    """Changes of a worker's pages, in order."""

    first: int
    """Number of the first. Numbers begin at 1."""
    keys: bytes
    kinds: bytes

    @property
    def end(self) -> int:
        """Number of the one that follows."""
        return self.first + len(self.kinds)


class ShardSnapshot(NamedTuple):
    """All pages of a worker in shards [first_shard, end_shard)."""

    sequence: int
    """The last event that it contains."""
    first_shard: int
    end_shard: int
    keys: bytes
    tiers: bytes


class Wanted(NamedTuple):
    """What a router knows of a worker's pages."""

    next_sequence: int = 0
    """The first event that it has not heard of; 0 if it knows nothing."""
    next_shard: int = SHARDS
    """The first shard of a snapshot that it has not got; SHARDS for none."""


def read_events(events: Events, groups: int = 1) -> ShortKeys:
    """The keys of well-formed events of a model with so many groups.

    Raises:
        MalformedPagesError: they are not.
    """
    return _read(events.keys, events.kinds, _of_groups(_KINDS, groups))


def read_part(part: ShardSnapshot, groups: int = 1) -> ShortKeys:
    """The keys of a well-formed part, likewise. A key may be there once for each group.

    Raises:
        MalformedPagesError: it is not, or has keys of other shards.
    """
    keys = _read(part.keys, part.tiers, _of_groups(_TIERS, groups))
    shards = keys & np.uint64(SHARDS - 1)
    if not 0 <= part.first_shard < part.end_shard <= SHARDS:
        raise MalformedPagesError("unknown")
    if keys.size and not (part.first_shard <= shards.min() and shards.max() < part.end_shard):
        raise MalformedPagesError("unknown")
    return keys


@cache
def _of_groups(marks: tuple[int, ...], groups: int) -> bytes:
    return bytes(mark + GROUP * group for group in range(groups) for mark in marks)


def _read(keys: bytes, marks: bytes, known: bytes) -> ShortKeys:
    if len(keys) + len(marks) > MOST_BYTES:
        raise MalformedPagesError("oversized")
    if len(keys) != SHORT_BYTES * len(marks) or marks.translate(None, known):
        raise MalformedPagesError("unknown")
    return np.frombuffer(keys, "<u8")
