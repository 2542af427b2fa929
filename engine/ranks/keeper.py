"""The processes of the other ranks, and the thread that keeps them.

The kernel kills a rank when the thread that started it ends (`engine.ranks.process`). So one thread
starts the ranks and then lives as long as they may: the keeper. It sleeps until a rank reports, a
rank's process ends, or the ranks are closed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import zmq

from engine.ranks.process import FAILED, REPORTS, address, environment

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


STOP_S: Final = 5.0
"""Ranks get this long to end when they are told to, seconds."""
LAST_REPORT_MS: Final = 200
"""A rank that has ended may have said why. Its report is there within this time."""
STDERR: Final = 2
"""File descriptor: a rank's output is no protocol, and goes to the log."""


class RankError(Exception):
    """A rank failed or is gone; the message names the rank and the reason."""


class Keeper:
    """Starts ranks 1 to `size - 1` and watches them until `close`. Any thread may call it."""

    def __init__(self, folder: Path, size: int, threads: int) -> None:
        self.pids: dict[int, int] = {}
        """Processes by rank. Set by the keeper's thread."""
        self.lost = ""
        """Why the ranks are lost; empty: they are not."""
        self._folder = folder
        self._size = size
        self._threads = threads
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
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
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(address(folder, REPORTS))
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
        for process in self._processes.values():
            process.kill()
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
            for rank in range(1, self._size):
                self._processes[rank] = self._start(rank)
            self.pids = {rank: process.pid for rank, process in self._processes.items()}
            self._watch()
        except Exception as error:
            self.lose(f"they cannot be kept: {error}")
        finally:
            self._end()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.ranks", str(self._folder), str(os.getpid())],
            env={**os.environ, **own, **environment(rank, self._size, self._threads)},
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            start_new_session=True,  # The terminal's Ctrl-C reaches rank 0 alone.
        )

    def _watch(self) -> None:
        poller = zmq.Poller()
        ranks = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
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
        self.lose(f"rank {rank} {_ending(self._processes[rank].wait())}")

    def _end(self) -> None:
        ends_s = time.monotonic() + STOP_S
        for process in self._processes.values():
            try:
                process.wait(max(0.0, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._context.destroy(linger=0)
        os.close(self._wake)
        os.close(self._waker)


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _unheard(_reason: str) -> None:
    """Default for `on_lost`: does nothing."""


def is_stopped(pid: int) -> bool:
    """Whether a process of this host was stopped, by SIGSTOP or a debugger."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")
