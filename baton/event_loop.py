"""The event loop of a process: which one it is, what it needs of the system, and how the process is
told to end.

Life of a process that serves: the first SIGTERM or SIGINT -> it drains, for a bounded time, which a
second one cuts short -> it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final

SWITCH_INTERVAL_S: Final = 1e-4
"""A loop that wakes up beside a busy thread (a step loop, spans that are encoded) waits so long for
the interpreter: 0.3 ms in all, and 5 ms with Python's own interval."""
TIMER_SLACK_NS: Final = 1_000
"""How much later than asked for the kernel may wake a thread: 50 us by default, as long as the
shortest waits of a worker are."""
_PR_SET_TIMERSLACK: Final = 29
MAX_OPEN_FILES: Final = 1 << 20
"""Some containers allow a thousand times as many, and some libraries count to the limit."""


def prepare_to_serve() -> None:
    """Called by a process that serves, before it has threads: its event loop gets the interpreter
    soon, its threads wake up when they asked to, and it may have as many connections as the system
    lets it. What a shell allows by default, 1,024 open files, is less than a router's clients may
    need."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: it takes a tenth of the CPU time off streams."""
    with contextlib.suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None


class EndSignals:
    """SIGTERM and SIGINT, which the running loop takes from now on."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        """Set by the first of them."""
        self._second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._count)

    async def bound(self, drain: Coroutine[Any, Any, None], patience_s: float) -> None:
        """Returns when `drain` has come to its end, the time is up or the second signal came."""
        drained = asyncio.create_task(drain)
        hurried = asyncio.create_task(self._second.wait())
        await asyncio.wait(
            {drained, hurried}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (drained, hurried):
            task.cancel()

    def _count(self) -> None:
        (self._second if self.first.is_set() else self.first).set()
