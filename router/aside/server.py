"""The fork server, a process of its own: `python -P -m router.aside.server MODULE`.

MODULE has `prepare(argument)`. It gets ready and returns functions by the kind of work. Each takes
the bytes of a question and returns those of the answer.

Life of a server: started -> prepared, which it says -> forks as it is ordered -> its socket ends,
and it ends with all that it has forked. It has one thread, so that it may fork.

Life of what it forked: it takes bounds, answers one question after the other on a socket of its
own, and ends with that socket. Beyond its bounds the kernel ends it, and whoever waits sees its
socket end.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NoReturn

from router.aside.wire import BEGUN, DONE, FAILED, MOST_ORDER_BYTES, Bounds, message, read
from telemetry.trouble import describe

Work = Mapping[str, Callable[[bytes], bytes]]
_PR_SET_PDEATHSIG: Final = 1
_ORDERS: Final = 0
"""The socket of orders is the standard input."""
_COMPLAINTS: Final = 2
_FIRST_FREE: Final = 3
_NICENESS: Final = 5
"""The router's own loop goes first."""


class _Server:
    def __init__(self, orders: socket.socket, work: Work) -> None:
        self._orders = orders
        self._work = work
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ)
        self._forked: dict[int, int] = {}
        """Pidfds of living processes by the number that the router gave."""

    def run(self) -> None:
        """Forks as it is ordered, until the router is gone."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._orders:
                    self._reap(key.data, key.fd)
                    continue
                data, fds, _, _ = socket.recv_fds(self._orders, MOST_ORDER_BYTES, 1)
                if not data:
                    return
                self._obey(json.loads(data), fds)

    def close(self) -> None:
        for pidfd in self._forked.values():
            _kill(pidfd)

    def _obey(self, order: dict[str, Any], fds: list[int]) -> None:
        number = order["number"]
        if order["do"] == "end":
            if number in self._forked:
                _kill(self._forked[number])
            return
        (fd,) = fds
        pid = os.fork()
        if not pid:
            _serve(fd, self._work[order["kind"]], Bounds(*order["bounds"]))
        os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._forked[number] = pidfd
        self._selector.register(pidfd, selectors.EVENT_READ, (number, pid))

    def _reap(self, forked: tuple[int, int], pidfd: int) -> None:
        number, pid = forked
        os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        del self._forked[number]


def _serve(fd: int, work: Callable[[bytes], bytes], bounds: Bounds) -> NoReturn:
    """The life of a forked process."""
    code = 1
    try:
        die_with_parent()
        os.closerange(_FIRST_FREE, fd)
        os.closerange(fd + 1, max(fd, 1024) + 1)
        with open(os.devnull, "r+b", buffering=0) as nothing:
            for taken in (_ORDERS, _COMPLAINTS):  # They would quote what a request brought.
                os.dup2(nothing.fileno(), taken)
        os.nice(_NICENESS)
        bound_memory(bounds.memory_bytes)
        with socket.socket(fileno=fd) as own, own.makefile("rb") as stream:
            own.sendall(BEGUN)
            while (question := read(stream)) is not None:
                signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
                try:
                    answer = message(work(question), DONE)
                except MemoryError:
                    raise  # A bound is met.
                except Exception as error:
                    answer = message(describe(error).encode(), FAILED)
                signal.setitimer(signal.ITIMER_PROF, 0)
                own.sendall(answer)
        code = 0
    finally:
        os._exit(code)


def bound_memory(more_bytes: int) -> None:
    """Lets this process take so many bytes of address space beyond those that it has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = taken + more_bytes
    resource.setrlimit(
        resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def die_with_parent() -> None:
    """The kernel ends this process when the thread that started it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill(pidfd: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def main() -> None:
    """Prepares, says so, and serves."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The router's end is this one's.
    with socket.socket(fileno=_ORDERS) as orders:
        order = json.loads(orders.recv(MOST_ORDER_BYTES))
        bounds = Bounds(*order["bounds"])
        bound_memory(bounds.memory_bytes)
        signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
        work: Work = importlib.import_module(sys.argv[1]).prepare(order["argument"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        gc.collect()
        gc.freeze()
        orders.send(b"{}")
        server = _Server(orders, work)
        try:
            server.run()
        finally:
            server.close()


if __name__ == "__main__":
    main()
