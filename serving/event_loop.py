"""The event loop of a process that serves: its implementation, its system settings, its end.

The first SIGTERM or SIGINT makes the process drain, for a bounded time. A second signal cuts that
short. Then the process stops.
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
"""Longest turn of a thread that holds the interpreter. Beside a busy thread, such as a step loop or
the encoding of spans, the event loop wakes up 0.3 ms late; with Python's default it is 5 ms."""
TIMER_SLACK_NS: Final = 1_000
"""Longest delay that the kernel may add to a thread's wake-up. Its default of 50 us is as long as
the shortest waits of a worker."""
_PR_SET_TIMERSLACK: Final = 29
MAX_OPEN_FILES: Final = 1 << 20
"""Largest limit to set. Some containers allow a thousand times more, and some libraries loop up to
the limit."""


def prepare_to_serve() -> None:
    """Prepares a process to serve; call it before threads start.

    Its event loop gets the interpreter soon, its threads wake up on time, and it may open as many
    connections as the system allows. A shell's default of 1,024 open files is too low for the
    clients of a router.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's factory where it is installed: it saves streams a tenth of CPU time."""
    with contextlib.suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None


class EndSignals:
    """Handles SIGTERM and SIGINT on the running loop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        """Set by the first signal."""
        self._second = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._count)

    async def bound(self, drain: Coroutine[Any, Any, None], patience_s: float) -> None:
        """Returns when `drain` has ended, the time is up, or the second signal came."""
        drained = asyncio.create_task(drain)
        hurried = asyncio.create_task(self._second.wait())
        await asyncio.wait(
            {drained, hurried}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (drained, hurried):
            task.cancel()

    def _count(self) -> None:
        (self._second if self.first.is_set() else self.first).set()
