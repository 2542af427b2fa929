"""The parent of a host's leader or agent, which says to the routers when all there have ended.

Nobody else would see the end of rank 0, or of the ranks of an agent that is killed. The guard does
nothing else, and needs no torch. If it is killed itself, the kernel kills the others with it, and
the next start on this host says what became of them (`worker.hosts.witness`).

Who keeps ranks reaps those that end, after which they have no name. So it tells the guard of them
as soon as they are started, over a pipe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine.hosts.lifeline import STOPPED_S
from engine.hosts.processes import is_stopped
from engine.parent import end_with_parent
from kv_transfer.transports.processes import NOWHERE, process_of
from serving.net.internal_net import workers_net
from worker.hosts.witness import Witness
from worker.router_addresses import RouterAddresses
from worker.settings import WorkerSettings

_PR_SET_CHILD_SUBREAPER: Final = 36
"""Number of Linux: who loses its parent below this process gets this one."""
LOOK_S: Final = 0.2
"""The guard looks this often whether its child lives, seconds: so late it may see the end. Not
tuned."""
_MOST_READ: Final = 1 << 20
"""Bytes of names. A pipe holds less, unless it was made larger."""
_PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Guard:
    """The parent, from the leader or agent."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def keeps(self, pids: Collection[int]) -> None:
        """The guard shall bear witness of these children, none of which has been reaped yet."""
        os.write(self._pipe, "".join(f"{process_of(pid)}\n" for pid in pids).encode())


class Child:
    """The leader or agent, from its parent.

    Args:
        pid: its process.
        pipe: has the names of the ranks that it keeps.
    """

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe
        self._processes = {process_of(pid)}
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)

    def wait(self) -> int:
        """Waits until it and all that it has started have ended; returns its exit code."""
        status = self._status()
        for number in _PASSED_ON:
            signal.signal(number, signal.SIG_IGN)
        while children := _children():
            self._processes |= {process_of(child) for child in children}
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(-1, 0)
        # Whatever was below the child has come to this process, or was reaped.
        with suppress(BlockingIOError):
            self._processes |= set(os.read(self._pipe, _MOST_READ).decode().splitlines())
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _status(self) -> int:
        """Waits for the end of the child itself. One that is stopped is lost to its group, and is
        killed as soon as that knows it."""
        stopped_s = 0.0
        while True:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                return status
            stopped_s = stopped_s + LOOK_S if is_stopped(self._pid) else 0.0
            if stopped_s >= STOPPED_S:
                os.kill(self._pid, signal.SIGKILL)
            time.sleep(LOOK_S)

    @property
    def processes(self) -> set[str]:
        """All that have ended, as `Endpoint.process` names them."""
        return self._processes - {NOWHERE}

    def _pass_on(self, number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)


def main(child: Child, settings: WorkerSettings) -> int:
    """Waits for the end of the child, and bears witness. Returns the child's exit code."""
    code = child.wait()
    if code:  # One that ends in order has told the routers itself.
        with RouterAddresses(settings.routers) as routers:
            net = workers_net(settings.tls, settings.name)
            Witness(settings.name, routers, net).say(child.processes)
    return code


def guarded() -> Child | Guard:
    """Forks, before there are threads. Returns what each of both has of the other."""
    parent = os.getpid()
    out, into = os.pipe()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if pid := os.fork():
        os.close(into)
        os.set_blocking(out, False)
        return Child(pid, out)
    os.close(out)
    end_with_parent(parent)
    return Guard(into)


def _children() -> list[int]:
    listed = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for file in listed for pid in file.read_text().split()]
