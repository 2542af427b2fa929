"""Lanes: a thread for each direction that copies pages, and its measured rate.

The step loop puts copies into a lane and reads later which have ended. It never waits for one. A
copy has a deadline: twice the time that it should take by the rate measured so far.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from engine.averages import averaged
from engine.tiers.movers import PageMover
from engine.types import PageIds
from faults import failpoints

log = logging.getLogger("baton.engine")

LATE: Final = 2.0
"""A copy, or a fetch from a peer, is late after so many times its estimate."""
LEAST_DEADLINE_S: Final = 0.1
"""No copy is late before, seconds: a thread may wait that long for a busy machine."""
STOP_S: Final = 5.0
"""Longest wait for the copies under way at the end, seconds."""
_MEASURED_PAGES: Final = 64
"""Pages of the first copy, which measures the rate: enough that starting it is no part of it."""


@dataclass(eq=False, slots=True, kw_only=True)
class Copy:
    """Pages that a lane copies."""

    pages: PageIds
    slots: PageIds
    due_s: float = 0.0
    """By `time.monotonic`; late after that."""
    late: bool = False
    failed: bool = False
    seconds: float = 0.0
    """Time that the copy took, once it has ended."""


@dataclass(eq=False, slots=True)
class Lane:
    """One direction. All but `_run` belongs to the step loop's thread."""

    name: str
    move: Callable[[Copy], None]
    page_bytes: int
    ended: queue.SimpleQueue[Copy]
    wake: Callable[[], None] = lambda: None
    """Called from the lane's thread when a copy has ended."""
    bytes_per_s: float = 0.0
    """Moving average."""
    bytes_moved: int = 0
    ahead_pages: int = 0
    """Pages in copies that have not ended."""
    late: int = 0
    """Copies that are late and have not ended. While there are any, the lane may stand still."""
    failures: int = 0
    """Copies that were late or failed."""
    _copies: queue.SimpleQueue[Copy | None] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        name = f"baton-kv-{self.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def expected_s(self, pages: int) -> float:
        """Seconds until a copy of so many pages would end, behind those that are there."""
        return (self.ahead_pages + pages) * self.page_bytes / max(self.bytes_per_s, 1.0)

    def put(self, copy: Copy) -> None:
        """Queues a copy."""
        expected_s = self.expected_s(len(copy.pages))
        copy.due_s = time.monotonic() + max(LATE * expected_s, LEAST_DEADLINE_S)
        self.ahead_pages += len(copy.pages)
        self._copies.put(copy)

    def settle(self, copy: Copy) -> None:
        """Counts a copy that has ended."""
        self.ahead_pages -= len(copy.pages)
        self.late -= copy.late
        self.failures += copy.failed and not copy.late
        if not copy.failed:
            size = len(copy.pages) * self.page_bytes
            self.bytes_moved += size
            rate = size / max(copy.seconds, 1e-6)
            self.bytes_per_s = averaged(self.bytes_per_s, rate)

    def mark_late(self, copy: Copy) -> None:
        """Counts a copy as failed. It goes on, and its waiters go on without it."""
        copy.late = True
        self.late += 1
        self.failures += 1

    def stop(self) -> bool:
        """Ends the thread. Returns whether its copies have ended."""
        self._copies.put(None)
        self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def _pass_failpoint(self) -> None:
        if self.name == "save":
            failpoints.hit("tiers.save")
        else:
            failpoints.hit("tiers.load")

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            began = time.monotonic()
            try:
                self._pass_failpoint()
                self.move(copy)
            except Exception:
                log.exception("KV pages could not be copied", extra={"lane": self.name})
                copy.failed = True
            copy.seconds = time.monotonic() - began
            self.ended.put(copy)
            self.wake()


class Lanes:
    """Both directions of a mover.

    Args:
        mover: copies pages.
        page_bytes: bytes of a page.
        rates: bytes a second of saves and of loads, as measured at the start.
    """

    def __init__(self, mover: PageMover, page_bytes: int, rates: tuple[float, float]) -> None:
        self._ended: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self.saves = Lane(
            "save", lambda copy: mover.save(copy.pages, copy.slots), page_bytes, self._ended
        )
        self.loads = Lane(
            "load", lambda copy: mover.load(copy.slots, copy.pages), page_bytes, self._ended
        )
        self.saves.bytes_per_s, self.loads.bytes_per_s = rates

    def wakes(self, wake: Callable[[], None]) -> None:
        """Calls `wake`, on another thread, when a copy has ended."""
        self.saves.wake = self.loads.wake = wake

    def ended(self) -> list[Copy]:
        """Copies that have ended since the last call."""
        found: list[Copy] = []
        while not self._ended.empty():
            found.append(self._ended.get())
        return found

    def stop(self) -> bool:
        """Ends both. Returns whether all copies have ended."""
        return self.saves.stop() & self.loads.stop()


def measure(
    mover: PageMover, num_pages: int, num_slots: int, page_bytes: int
) -> tuple[float, float]:
    """Bytes a second of a save and of a load. Only before anything else uses pages and slots: the
    pages get the bytes back that they had."""
    count = min(_MEASURED_PAGES, num_pages, num_slots)
    places = np.arange(count, dtype=np.int32)

    def rate(move: Callable[[PageIds, PageIds], None]) -> float:
        move(places, places)  # The first time is slow.
        began = time.monotonic()
        move(places, places)
        return count * page_bytes / max(time.monotonic() - began, 1e-6)

    return rate(mover.save), rate(mover.load)
