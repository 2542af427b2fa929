"""A router that follows the pages of one worker.

Life: it asks, and gets all pages in parts; then it hears of each change. A message that is not the
next one is dropped and counted. Then the router asks for what it needs next, and keeps what it has.

1. *From the start*: nothing is known, or the ring of the worker has moved on. The first part of a
   snapshot is a new beginning, if it contains events that are not known yet.
2. *Parts*: each replaces some shards, and contains exactly the events before the next one. Events
   go on between the parts.
3. *In step*: all shards are there.

Invariant: shards before `next_shard` are as the worker's were before event `next_sequence`.

To ask is cheap, but an answer takes its time, and messages that were under way are out of order.
So it asks again only after a while, which doubles until something fits. A worker that says nothing
more is asked, too, if its load report names later events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

from prefixes.codec import (
    Events,
    MalformedPagesError,
    ShardSnapshot,
    Wanted,
    read_events,
    read_part,
)
from prefixes.index import BOTH, HOST, POOL, SHARDS, PrefixIndex
from prefixes.keys import ShortKeys

ASK_AGAIN_S: Final = 0.5
MOST_S: Final = 30.0
"""Longest time until it asks again."""
SILENT: Final = "silent"
"""Reason to ask: messages are missing, and none comes."""


class Follower:
    """See the module. Belongs to the router's event loop.

    Args:
        index: in which the worker's pages are kept.
        holder: the worker's name there. It joins.
        ask: sends a question to the worker.
        dropped: counts messages, by reason.
        asked: counts questions after the first, by reason.
    """

    def __init__(
        self,
        index: PrefixIndex,
        holder: str,
        ask: Callable[[Wanted], None],
        dropped: Counter[str],
        asked: Counter[str],
    ) -> None:
        self.holder = holder
        self.behind = 0
        """Events that the worker has announced and this router has not received, by the last load
        report."""
        self._index = index
        self._ask = ask
        self._dropped = dropped
        self._asked = asked
        self._next = Wanted(0, 0)
        self._is_asked = False
        """A question waits for its answer."""
        self._ask_again_s = 0.0
        self._wait_s = ASK_AGAIN_S

    @property
    def is_in_step(self) -> bool:
        """Whether nothing is missing, as far as this router knows."""
        return not self.behind and self._next.next_shard == SHARDS

    def start(self, now_s: float) -> None:
        """Joins the index, and asks for the first time."""
        self._index.join(self.holder)
        self._send(now_s)

    def end(self) -> None:
        """The worker is gone: all that is known of it is forgotten."""
        self._index.leave(self.holder)

    def events(self, events: Events, now_s: float) -> None:
        """Takes events."""
        try:
            keys = read_events(events, self._index.groups)
        except MalformedPagesError as error:
            self._drop(error.reason, now_s)
            return
        if events.first != self._next.next_sequence or not events.kinds:
            self._drop("unordered", now_s)
            return
        self._index.apply(self.holder, keys.tolist(), events.kinds)
        self._go_on(Wanted(events.end, self._next.next_shard), now_s)

    def part(self, part: ShardSnapshot, now_s: float) -> None:
        """Takes a part of a snapshot."""
        try:
            keys = read_part(part, self._index.groups)
        except MalformedPagesError as error:
            self._drop(error.reason, now_s)
            return
        next_sequence, next_shard = self._next
        begins = part.first_shard == 0 and part.sequence >= next_sequence
        goes_on = part.first_shard == next_shard and part.sequence + 1 == next_sequence
        if not (begins or goes_on):
            self._drop("unordered", now_s)
            return
        self._replace(part, keys)
        self._go_on(Wanted(part.sequence + 1, part.end_shard), now_s)

    def announced(self, sequence: int, now_s: float) -> None:
        """A load report names the worker's last event."""
        self.behind = max(0, sequence + 1 - max(1, self._next.next_sequence))
        if not self.is_in_step and now_s >= self._ask_again_s:
            self._ask_for(SILENT, now_s)

    def _replace(self, part: ShardSnapshot, keys: ShortKeys) -> None:
        self._index.clear(self.holder, part.first_shard, part.end_shard)
        tiers = np.frombuffer(part.tiers, np.uint8)
        for tier in (POOL, HOST):
            there = (tiers & tier) != 0
            kinds = (tiers[there] & ~np.uint8(BOTH) | tier).tobytes()
            self._index.apply(self.holder, keys[there].tolist(), kinds)

    def _go_on(self, wanted: Wanted, now_s: float) -> None:
        self._next = wanted
        self._wait_s = ASK_AGAIN_S
        self._ask_again_s = now_s + ASK_AGAIN_S
        self._is_asked = False

    def _drop(self, reason: str, now_s: float) -> None:
        self._dropped[reason] += 1
        if not self._is_asked or now_s >= self._ask_again_s:
            self._ask_for(reason, now_s)

    def _ask_for(self, reason: str, now_s: float) -> None:
        self._asked[reason] += 1
        self._send(now_s)

    def _send(self, now_s: float) -> None:
        self._is_asked = True
        self._ask_again_s = now_s + self._wait_s
        self._wait_s = min(MOST_S, 2 * self._wait_s)
        self._ask(self._next)
