"""The parent of a host's leader or agent, which says to the routers when all there have ended.

Nobody else would see the end of rank 0, or of the ranks of an agent that is killed. The guard does
nothing else, and needs no torch. If it is killed itself, the kernel kills the others with it, and
the next start on this host says what became of them (`worker.hosts.witness`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine.hosts.lifeline import STOPPED_S
from engine.hosts.processes import is_stopped
from engine.parent import end_with_parent
from kv_transfer.transports.processes import process_of
from serving.net.internal_net import workers_net
from worker.hosts.witness import Witness
from worker.router_addresses import RouterAddresses
from worker.settings import WorkerSettings

_PR_SET_CHILD_SUBREAPER: Final = 36
"""Number of Linux: who loses its parent below this process gets this one."""
LOOK_S: Final = 0.2
"""The guard looks this often whether its child lives."""
_PASSED_ON: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Child:
    """The leader or agent, from its parent."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
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
        return self._processes

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


def guarded() -> Child | None:
    """Forks, before there are threads. Returns None in the child, which goes on."""
    parent = os.getpid()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if pid := os.fork():
        return Child(pid)
    end_with_parent(parent)
    return None


def _children() -> list[int]:
    listed = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return [int(pid) for file in listed for pid in file.read_text().split()]
