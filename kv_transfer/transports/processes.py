"""Proof that a peer's process is gone, where it lives on this host.

Pages that a process may still write stay quarantined until it says that it is done, or is proven
to exist no more. The proof here is the kernel's: a pidfd becomes readable when the last thread of
its process has ended (pidfd_open(2)), and nothing but that makes it readable; a stopped or frozen
process keeps it silent. A process of another host, or of a PID namespace that this one cannot
see, is never proven gone here.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

_DIGITS: Final = re.compile("[0-9]{1,20}")
_MOST_PID: Final = 1 << 22
"""Largest number of a process on Linux; see proc(5)."""
NOWHERE = ""
"""Stands for a process that nobody here can watch."""


class _Process(NamedTuple):
    """A process, told apart from every other that ever had its number."""

    host: str
    """Boot id and PID namespace: where the number means something."""
    pid: int
    started: str
    """Ticks since boot."""


def own_process() -> str:
    """This process, for peers to watch; travels in `Endpoint.process`."""
    return process_of(os.getpid())


def process_of(pid: int) -> str:
    """A process of this host, as `Endpoint.process` names it; NOWHERE if it cannot be told."""
    try:
        return "/".join((_host(), str(pid), _started(pid)))
    except (OSError, ValueError):
        return NOWHERE


def this_host() -> str:
    """What the names of all processes begin with that can be watched from here, but for a slash;
    NOWHERE if it cannot be told."""
    try:
        return _host()
    except OSError:
        return NOWHERE


def has_ended(process: str) -> bool:
    """Whether the kernel of this host says that a process has ended."""
    found = _parse(process)
    if found is None:
        return False
    try:
        pidfd = _open(found)
    except OSError:
        return False
    if pidfd is None:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    ended = bool(poll.poll(0))
    os.close(pidfd)
    return ended


class ProcessWatch:
    """Watches the processes of peers. A peer is reported once all of its processes have ended, and
    forgotten then."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._names: dict[int, str] = {}
        """Peer by pidfd, of processes that live."""
        self._alive: dict[str, int] = {}
        """Processes of each peer that have not ended."""
        self._over: list[str] = []
        """Peers of which no process is left, and that are not reported yet."""

    def watch(self, name: str, processes: Sequence[str]) -> None:
        """Watches all processes of peer `name`. If one of them cannot be watched from here, the
        peer is never reported."""
        wanted = [found for process in processes if (found := _parse(process))]
        if name in self._alive or len(wanted) < len(processes):
            return
        pidfds: list[int] = []
        for process in wanted:
            try:
                pidfd = _open(process)
            except OSError:
                for opened in pidfds:
                    os.close(opened)
                return
            if pidfd is not None:
                pidfds.append(pidfd)
        self._alive[name] = len(pidfds)
        if not pidfds:
            self._over.append(name)
        for pidfd in pidfds:
            self._names[pidfd] = name
            self._poll.register(pidfd, select.POLLIN)

    def gone(self) -> list[str]:
        """Peers of which no process is left, since the last call."""
        if not self._alive:
            return []
        for pidfd, _ in self._poll.poll(0):
            name = self._names.pop(pidfd)
            self._alive[name] -= 1
            if not self._alive[name]:
                self._over.append(name)
            self._poll.unregister(pidfd)
            os.close(pidfd)
        gone, self._over = self._over, []
        for name in gone:
            del self._alive[name]
        return gone

    def close(self) -> None:
        """Stops watching."""
        for pidfd in self._names:
            os.close(pidfd)
        self._names.clear()
        self._alive.clear()
        self._over.clear()


def _open(process: _Process) -> int | None:
    """A pidfd of the process; None: it has ended.

    Raises:
        OSError: it cannot be watched.
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    started = _started_or_none(process.pid)
    if started is None or started == process.started:  # hidden or ended: the pidfd will tell
        return pidfd
    os.close(pidfd)  # the number is another process's by now
    return None


def _parse(process: str) -> _Process | None:
    """None where it is not a process of this host."""
    try:
        boot, namespace, pid, started = process.split("/")
        if not _DIGITS.fullmatch(pid) or not _DIGITS.fullmatch(started):
            return None
        found = _Process(f"{boot}/{namespace}", int(pid), started)
        known = found.pid <= _MOST_PID and found.host == _host()
        return found if known and found.pid != os.getpid() else None
    except (OSError, ValueError):
        return None


def _host() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str:
    # The name, field 2, may hold spaces and parentheses: count from behind its end.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _started_or_none(pid: int) -> str | None:
    """None where the process has ended, or /proc does not show it (hidepid)."""
    try:
        return _started(pid)
    except (OSError, IndexError):
        return None
