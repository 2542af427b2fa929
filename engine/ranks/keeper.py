"""The processes of the other ranks, and the thread that keeps them.

The kernel kills a rank when the thread that started it ends (`engine.ranks.process`). So one thread
starts the ranks of this host and then lives as long as they may: the keeper. It sleeps until a rank
reports, a rank's process ends, or the ranks are closed. Agents keep the ranks of other hosts
(`engine.hosts`), and say when they are lost.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import zmq

from engine.hosts.processes import STOP_S, RankProcesses
from engine.ranks.process import FAILED, LOADED

log = logging.getLogger("baton.engine")

Report = dict[str, Any]
LOOK_MS: Final = 500
"""The keeper looks this often whether the ranks go on."""


class Pulse(NamedTuple):
    """What moves while the ranks go on."""

    progress: float
    """The step loop's counter, or how far the ranks' start has come."""
    allowed_s: float
    """It may stand still for this long, seconds."""
    still: str = "no step has ended"
    """What is wrong if it does."""


LAST_REPORT_MS: Final = 200
"""A rank that has ended may have said why. Its report is there within this time."""


class RankError(Exception):
    """A rank failed or is gone; the message names the rank and the reason."""


class Keeper:
    """Starts the ranks of this host and watches them until `close`. Any thread may call it.

    Args:
        processes: those of this host.
        size: ranks of all hosts.
        inbox: the bound socket of all reports. It belongs to the keeper from now on.
        beat: is called on the keeper's thread for as long as it is well.
    """

    def __init__(
        self,
        processes: RankProcesses,
        size: int,
        inbox: zmq.Socket[bytes],
        beat: Callable[[], None] | None = None,
    ) -> None:
        self.lost = ""
        """Why the ranks are lost; empty: they are not."""
        self._size = size
        self._processes = processes
        self._inbox = inbox
        self._beat = beat or _unneeded
        self._reports: dict[str, dict[int, Report]] = {}
        self._changed = threading.Condition()
        self._on_lost: Callable[[str], None] = _unheard
        self._pulse: Callable[[], Pulse] | None = None
        self._why_hung: Callable[[], str] = str
        self._progress = -1.0
        self._still_s = 0.0
        self._looked_s = 0.0
        self._wake, self._waker = os.pipe()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="baton-ranks", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises RankError if the ranks are lost."""
        if self.lost:
            raise RankError(self.lost)

    def wait_for(self, kind: str, also: Callable[[], bool] = lambda: True) -> list[Report]:
        """Waits until every rank has reported `kind`, and until `also` says yes.

        Returns:
            The reports by rank.

        Raises:
            RankError: the ranks are lost.
        """
        with self._changed:
            while len(self._reports.get(kind, {})) < self._size - 1 or not also():
                self.check()
                self._changed.wait(0.05)
            self.check()
            return [self._reports[kind][rank] for rank in range(1, self._size)]

    def call_when_lost(self, on_lost: Callable[[str], None]) -> None:
        """Calls `on_lost` once, on any thread, with the reason, when the ranks are lost."""
        with self._changed:
            self._on_lost = on_lost
            if not self.lost:
                return
        on_lost(self.lost)

    def lose(self, reason: str) -> None:
        """Gives the ranks up and kills those that live."""
        with self._changed:
            if self.lost or self._closing:
                return
            self.lost = reason
            on_lost = self._on_lost
            self._changed.notify_all()
        log.error("the ranks are lost: %s", reason)
        self._processes.kill()
        on_lost(reason)

    def watch(self, pulse: Callable[[], Pulse], why: Callable[[], str]) -> None:
        """Gives the ranks up where the pulse stands still for longer than it may. Time in which
        this process stood still does not count. A second call replaces the first.

        Args:
            pulse: to be read on the keeper's thread.
            why: says which ranks are the reason.
        """
        self._pulse, self._why_hung = pulse, why
        os.write(self._waker, b"x")

    def reason(self, wait_s: float) -> str:
        """Why the ranks are lost, if that becomes known within `wait_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.lost), wait_s)
            return self.lost

    def close(self, stop: Callable[[], None]) -> None:
        """Ends all ranks: `stop` tells them to, and they are killed after STOP_S."""
        with self._changed:
            self._closing = True  # First: from now on a rank may end.
        stop()
        os.write(self._waker, b"x")
        self._thread.join()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._processes.start()
            self._watch()
        except Exception as error:
            self.lose(f"they cannot be kept: {error}")
        finally:
            self._end()

    def _watch(self) -> None:
        poller = zmq.Poller()
        ranks = self._processes.pidfds()
        try:
            for source in (self._inbox, self._wake, *ranks):
                poller.register(source, zmq.POLLIN)
            while not self._closing:
                for source, _ in poller.poll(LOOK_MS if self._pulse else None):
                    if source is self._inbox:
                        self._hear()
                    elif source == self._wake:
                        os.read(self._wake, 1)
                    elif (rank := ranks.get(source)) is not None:
                        poller.unregister(source)
                        self._ended(rank)
                self._beat()
                self._look()
        finally:
            for pidfd in ranks:
                os.close(pidfd)

    def _look(self) -> None:
        """Whether the ranks go on."""
        if self._pulse is None or self.lost:
            return
        now_s = time.monotonic()
        looked_ago_s, self._looked_s = now_s - self._looked_s, now_s
        progress, allowed_s, still = self._pulse()
        if progress != self._progress:
            self._progress, self._still_s = progress, 0.0
            return
        self._still_s += min(looked_ago_s, 2 * LOOK_MS / 1e3)
        if self._still_s >= allowed_s:
            self.lose(f"{still} for {allowed_s:.0f} s: {self._why_hung()}")

    def _hear(self) -> None:
        report: Report = json.loads(self._inbox.recv())
        kind, rank = report["kind"], report["rank"]
        if kind == FAILED:
            self.lose(f"rank {rank}: {report['reason']}")
            return
        with self._changed:
            self._reports.setdefault(kind, {})[rank] = report
            self._changed.notify_all()

    def _ended(self, rank: int) -> None:
        """Takes the end of a rank, for which it may have given its reason."""
        while self._inbox.poll(LAST_REPORT_MS):
            self._hear()
        self.lose(self._processes.ending(rank))

    def _end(self) -> None:
        # Ranks that still load cannot hear that they shall stop.
        all_loaded = len(self._reports.get(LOADED, {})) == self._size - 1
        self._processes.end(STOP_S if all_loaded else 0.0)
        self._inbox.close(linger=0)
        os.close(self._wake)
        os.close(self._waker)


def _unheard(_reason: str) -> None:
    """Default for `on_lost`: does nothing."""


def _unneeded() -> None:
    """Default for `beat`: nobody waits for it."""
