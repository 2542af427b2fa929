"""The processes of the ranks of this host. They end with the thread that starts them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.hosts.early import launch, take

STOP_S: Final = 5.0
"""Ranks get this long to end when they are told to, seconds. Steps in flight end first. Not
tuned."""


@dataclass(frozen=True, slots=True)
class Share:
    """The ranks of one host, and those of them that are processes of their own."""

    first: int
    count: int
    size: int
    """Ranks of all hosts."""

    @classmethod
    def of(cls, node: int, nodes: int, size: int) -> Share:
        """The share of a host, of `nodes` with equally many ranks each."""
        each = size // nodes
        return cls(node * each, each, size)

    @property
    def processes(self) -> range:
        """Rank 0 is the worker itself."""
        return range(max(1, self.first), self.first + self.count)


class RankProcesses:
    """Started by `start`, on a thread that lives as long as they may."""

    def __init__(
        self,
        folder: Path,
        share: Share,
        threads: int,
        started: Callable[[Collection[int]], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            folder: the private folder of this host.
            share: the ranks here.
            threads: of each rank.
            started: is told their process ids before any of them can be reaped.
        """
        self.pids: Mapping[int, int] = {}
        """Processes by rank."""
        self._folder = folder
        self._share = share
        self._threads = threads
        self._started = started
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Starts all. Raises OSError."""
        for rank in self._share.processes:
            self._processes[rank] = self._start(rank)
        self.pids = {rank: process.pid for rank, process in self._processes.items()}
        self._started(self.pids.values())

    def pidfds(self) -> dict[int, int]:
        """Descriptors that become readable when a rank has ended; whose they are. The caller closes
        them."""
        return {os.pidfd_open(pid): rank for rank, pid in self.pids.items()}

    def kill(self) -> None:
        """Kills those that live."""
        for process in self._processes.values():
            process.kill()

    def ending(self, rank: int) -> str:
        """How a rank that has ended did, as words."""
        code = self._processes[rank].wait()
        if code < 0:
            return f"rank {rank} was killed by {signal.Signals(-code).name}"
        return f"rank {rank} ended with code {code}"

    def end(self, within_s: float = STOP_S) -> None:
        """Waits for the end of all. Those that take longer are killed."""
        ends_s = time.monotonic() + within_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, ends_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, **self._environment(rank)}
        return take(self._folder, environment) or launch([str(self._folder)], environment)

    def _environment(self, rank: int) -> dict[str, str]:
        """torchrun's names."""
        share = self._share
        here = {
            "RANK": rank,
            "LOCAL_RANK": rank - share.first,
            "WORLD_SIZE": share.size,
            "LOCAL_WORLD_SIZE": share.count,
            "OMP_NUM_THREADS": self._threads,
        }
        return {name: str(value) for name, value in here.items()}


class StoppedRanks:
    """Which ranks of this host are stopped, and for how long.

    Args:
        every_s: a look within this time after the last one sees nothing.
    """

    def __init__(self, every_s: float = 0.0) -> None:
        self._every_s, self._looked_s = every_s, -math.inf
        self._since_s: dict[int, float] = {}

    @property
    def ranks(self) -> list[int]:
        """Ranks that were stopped at the last look."""
        return list(self._since_s)

    def look(self, pids: Mapping[int, int], least_s: float) -> int | None:
        """Looks at processes by rank. Returns one that has been stopped for so long."""
        now_s = time.monotonic()
        if now_s < self._looked_s + self._every_s:
            return None
        self._looked_s = now_s
        stopped = (rank for rank, pid in pids.items() if is_stopped(pid))
        self._since_s = {rank: self._since_s.get(rank, now_s) for rank in stopped}
        long = (rank for rank, since_s in self._since_s.items() if now_s - since_s >= least_s)
        return next(long, None)


def is_stopped(pid: int) -> bool:
    """Whether a process of this host was stopped, by SIGSTOP or a debugger."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")
