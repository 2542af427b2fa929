"""Proof that a peer's process is gone, where it lives on this host.

Pages that a process may still write stay quarantined until it says that it is done, or is proven
to exist no more. The proof here is the kernel's: a pidfd becomes readable when the last thread of
its process has ended (pidfd_open(2)), and nothing but that makes it readable; a stopped or frozen
process keeps it silent. A process of another host, or of a PID namespace that this one cannot
see, is never proven gone here.
"""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import NamedTuple

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
    try:
        return "/".join((_host(), str(os.getpid()), _started(os.getpid())))
    except (OSError, ValueError):
        return NOWHERE


class ProcessWatch:
    """Watches the processes of peers. Each is reported once, and forgotten then."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._names: dict[int, str] = {}
        """Peer by pidfd; -1, -2, ... for those found gone at once."""

    def watch(self, name: str, process: str) -> None:
        """Watches the process of peer `name`; one that cannot be watched from here is ignored."""
        if name in self._names.values() or (wanted := _parse(process)) is None:
            return
        try:
            pidfd = os.pidfd_open(wanted.pid)
        except ProcessLookupError:
            self._names[-1 - len(self._names)] = name
            return
        except OSError:
            return
        started = _started_or_none(wanted.pid)
        if started is None or started == wanted.started:  # hidden or ended: the pidfd will tell
            self._names[pidfd] = name
            self._poll.register(pidfd, select.POLLIN)
        else:  # the number is another process's by now
            os.close(pidfd)
            self._names[-1 - len(self._names)] = name

    def gone(self) -> list[str]:
        """Peers whose process has ended, since the last call."""
        if not self._names:
            return []
        ended = [fd for fd, _ in self._poll.poll(0)] + [fd for fd in self._names if fd < 0]
        names = [self._names.pop(fd) for fd in ended]
        for fd in ended:
            if fd >= 0:
                self._poll.unregister(fd)
                os.close(fd)
        return names

    def close(self) -> None:
        """Stops watching."""
        for fd in self._names:
            if fd >= 0:
                os.close(fd)
        self._names.clear()


def _parse(process: str) -> _Process | None:
    """None where it is not a process of this host."""
    try:
        boot, namespace, pid, started = process.split("/")
        found = _Process(f"{boot}/{namespace}", int(pid), started)
        return found if found.host == _host() and found.pid != os.getpid() else None
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
