"""Waiting for what another process, thread or task is about to do.

`wait_until` blocks, `until` is awaited. Where what they wait for never holds, the test fails with
the condition's source text, and with what `show` returns then. A look that costs something, as a
scrape does, is taken less often: looking takes a fifth of the time at most.

A machine that others use gives this process little time, and as little to what it waits for. So a
wait ends only when it has looked often enough, too.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, TypeVar

T = TypeVar("T")
Show = Callable[[], object]

LOOKS_A_SECOND: Final = 2
"""A wait has looked at least so often for each of its seconds; an idle machine looks far more."""
WAIT_S: Final = 30.0
"""For what takes a moment: a machine with a noisy neighbour stalls a thread for seconds."""
REST: Final = 4
"""Between two looks passes at least so many times what the first of them took."""


def wait_until(
    holds: Callable[[], T], within_s: float = WAIT_S, *, poll_s: float = 0.01, show: Show = str
) -> T:
    """What `holds` returns, once that is true."""
    for found, took_s in _looks(holds, within_s, show):
        if found:
            return found
        time.sleep(max(poll_s, REST * took_s))
    raise AssertionError("unreachable")


async def until(holds: Callable[[], T], within_s: float = WAIT_S, *, show: Show = str) -> T:
    """What `holds` returns, once tasks of this event loop have made that true."""
    for found, took_s in _looks(holds, within_s, show):
        if found:
            return found
        await asyncio.sleep(max(0.005, REST * took_s))
    raise AssertionError("unreachable")


def _looks(holds: Callable[[], T], within_s: float, show: Show) -> Iterator[tuple[T, float]]:
    """What each look finds, and the seconds of CPU that it took in this thread."""
    ends_s = time.monotonic() + within_s
    for look in count(1):
        began_s = time.thread_time()
        found = holds()
        yield found, time.thread_time() - began_s
        assert time.monotonic() < ends_s or look < LOOKS_A_SECOND * within_s, (
            f"not within {within_s:g} s: {inspect.getsource(holds).strip()}\n{show()}"
        )
