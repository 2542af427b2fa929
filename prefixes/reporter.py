"""What a worker reports to one router about its pages: events, or a snapshot first."""

from __future__ import annotations

from typing import Final

from prefixes.codec import Events, ShardSnapshot, Wanted
from prefixes.index import SHARDS
from prefixes.log import PageLog

MOST_AT_ONCE: Final = 8
"""Messages of a turn."""


class PageReporter:
    """Goes on behind what the router knows. Belongs to one thread.

    A router that knows nothing, or for which the ring has too little, gets a snapshot from its
    first shard on. A part is reported only when all events so far are, since it contains them.

    Args:
        log: the worker's.
        wanted: what the router knows.
        most_at_once: messages of a turn.
    """

    def __init__(self, log: PageLog, wanted: Wanted, most_at_once: int = MOST_AT_ONCE) -> None:
        self._log = log
        self._most = most_at_once
        self._next = wanted

    @property
    def is_done(self) -> bool:
        """Whether everything was sent to the router."""
        return self._next == (self._log.end, SHARDS)

    def turn(self) -> list[Events | ShardSnapshot]:
        """The next messages."""
        log, messages = self._log, list[Events | ShardSnapshot]()
        sequence, shard = self._next
        if not (log.first <= sequence <= log.end and shard <= SHARDS):
            sequence, shard = log.end, 0
        while len(messages) < self._most:
            if sequence < log.end:
                messages.append(events := log.events(sequence))
                sequence = events.end
            elif shard < SHARDS:
                messages.append(part := log.part(shard))
                shard = part.end_shard
            else:
                break
        self._next = Wanted(sequence, shard)
        return messages
