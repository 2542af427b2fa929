"""What a worker reports to its routers about its pages.

The step loop only appends to a queue. The event loop writes the queue to a log every 50 ms, and
sends each router what it does not know yet. Nothing of this happens before a router has asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2
from prefixes.codec import Events, ShardSnapshot, Wanted
from prefixes.log import PageLog
from prefixes.reporter import PageReporter

if TYPE_CHECKING:
    from engine.pages.prefix import ReportPages
    from worker_base.outbox import Outbox

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 0.05
BUSY_S: Final = 0.005
"""Time to the next turn while a router is not sent everything."""
FAILED_S: Final = 5.0
"""Time to the next turn after one that failed."""
MOST_AT_ONCE: Final = 8192
"""Keys that a turn writes, about: it takes some milliseconds."""
MOST_UNREAD: Final = 64
"""A router that leaves so many messages unread is sent more later."""


class PageReports:
    """See the module. Belongs to the event loop, but for the queue.

    Args:
        begin: makes the engine report its pages.
    """

    def __init__(self, begin: Callable[[ReportPages], None]) -> None:
        self._begin = begin
        self._has_begun = False
        self._queue: deque[tuple[int, Sequence[bytes]]] = deque()
        self._log = PageLog()
        self._reporters: dict[Outbox, PageReporter] = {}

    @property
    def sequence(self) -> int:
        """Number of the last event; 0 before the first."""
        return self._log.end - 1

    def wanted(self, wanted: worker_pb2.PagesWanted, outbox: Outbox) -> None:
        """A router says what it knows."""
        if not self._has_begun:
            self._has_begun = True
            self._begin(lambda kind, keys: self._queue.append((kind, keys)))
        known = Wanted(wanted.next_sequence, wanted.next_shard)
        self._reporters[outbox] = PageReporter(self._log, known)

    def end_stream(self, outbox: Outbox) -> None:
        """A router is gone."""
        self._reporters.pop(outbox, None)

    async def report_forever(self) -> None:
        """Takes a turn every 50 ms; more often while there is more to send."""
        while True:
            try:
                self.turn()
            except Exception:  # Routers know less, and that is all.
                logger.exception("pages cannot be reported")
                await asyncio.sleep(FAILED_S)
            busy = bool(self._queue) or not all(one.is_done for one in self._reporters.values())
            await asyncio.sleep(BUSY_S if busy else INTERVAL_S)

    def turn(self) -> None:
        """Writes what is queued, and sends what is new."""
        if self._queue:
            self._log.write(*self._take())
        for outbox, reporter in self._reporters.items():
            if len(outbox) < MOST_UNREAD:
                for message in reporter.turn():
                    outbox.send(_message(message))

    def _take(self) -> tuple[list[bytes], bytes]:
        """Keys from the queue, and a kind for each."""
        taken, kinds = list[bytes](), bytearray()
        while self._queue and len(taken) < MOST_AT_ONCE:
            kind, keys = self._queue.popleft()
            if len(keys) > MOST_AT_ONCE:
                self._queue.appendleft((kind, keys[MOST_AT_ONCE:]))
            taken += keys[:MOST_AT_ONCE]
            kinds += bytes((kind,)) * (len(taken) - len(kinds))
        return taken, bytes(kinds)


def _message(new: Events | ShardSnapshot) -> worker_pb2.WorkResponse:
    if isinstance(new, Events):
        events = worker_pb2.PageEvents(first_sequence=new.first, keys=new.keys, kinds=new.kinds)
        return worker_pb2.WorkResponse(page_events=events)
    return worker_pb2.WorkResponse(
        page_snapshot=worker_pb2.PageSnapshot(
            sequence=new.sequence,
            first_shard=new.first_shard,
            end_shard=new.end_shard,
            keys=new.keys,
            tiers=new.tiers,
        )
    )
