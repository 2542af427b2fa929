"""Where the time of an event loop's thread goes, by looks at its stack, and its longest callbacks.

The kernel's timer of CPU time interrupts the process 500 times a second of it, and Python looks at
the stack at its next instruction. A look belongs to the innermost function that is in the table. A
look at a loop that waits for events is another thread's time and counts for nothing.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from types import FrameType
from typing import Any, NamedTuple

LONG_S = 5e-4
"""No callback shall take longer."""
READER = "be_router"
"""The task that reads these figures (`bench.crowd`)."""
LOOK_S = 1 / 500
IDLE = "idle"
OTHER = "other"
PARTS = {
    "uvicorn/protocols/http": "uvicorn",
    "h11/": "h11",
    "router/doors/straight.py": "straight writes",
    "router/doors": "door",
    "router/answers": "text of tokens",
    "router/requests/outputs.py": "outputs",
    "router/requests/tokenization.py": "text of tokens",
    "router/requests/request_span.py": "spans and figures",
    "router/requests": "requests",
    "router/dispatch": "dispatcher",
    "router/placement": "placement",
    "router/workers": "links",
    "prometheus_client": "spans and figures",
    "telemetry/metrics": "spans and figures",
    "telemetry": "spans and figures",
    "opentelemetry": "spans and figures",
    "starlette/": "starlette",
    "grpc/": "gRPC",
}
"""Parts by what the path of a file holds; the first that fits."""


class Parts:
    """Counts from now on. The main thread makes it."""

    def __init__(self) -> None:
        self._looks: Counter[str] = Counter()
        self._of_file: dict[str, str] = {}
        signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, LOOK_S, LOOK_S)

    def shares(self) -> dict[str, float]:
        """Looks of each part since the last call, as shares of the busy ones."""
        looks, self._looks = self._looks, Counter()
        looks.pop(IDLE, None)
        return {part: count / looks.total() for part, count in looks.most_common()}

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_qualname == "Runner.run":
            self._looks[IDLE] += 1  # uvloop waits.
        else:
            self._looks[self._part(frame)] += 1

    def _part(self, frame: FrameType | None) -> str:
        while frame is not None:
            name = frame.f_code.co_filename
            if (part := self._of_file.get(name)) is None:
                found = (one for text, one in PARTS.items() if text in name)
                part = self._of_file[name] = next(found, OTHER)
            if part != OTHER:
                return part
            frame = frame.f_back
        return OTHER


class Callbacks(NamedTuple):
    """The callbacks of a loop since the last look."""

    ended: int
    long: dict[str, tuple[int, float, float]]
    """Callbacks that took longer than `LONG_S`, by the name of the function, or of the task: how
    many, and their CPU seconds together and at most."""


class Stopwatch:
    """Measures each callback of asyncio's own loop by its thread's CPU time, from now on. uvloop's
    callbacks cannot be seen, so such a router is slower than one that serves."""

    def __init__(self) -> None:
        self._seen = Callbacks(0, {})
        inner = asyncio.events.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            named, began_s = name_of(handle), time.thread_time()
            inner(handle)
            self._note(named, time.thread_time() - began_s)

        asyncio.events.Handle._run = timed  # type: ignore[assignment, method-assign]

    def look(self) -> Callbacks:
        """What was seen since the last look."""
        seen, self._seen = self._seen, Callbacks(0, {})
        return seen

    def _note(self, name: str, took_s: float) -> None:
        if name == READER:
            return
        self._seen = self._seen._replace(ended=self._seen.ended + 1)
        if took_s > LONG_S:
            count, all_s, longest_s = self._seen.long.get(name, (0, 0.0, 0.0))
            self._seen.long[name] = count + 1, all_s + took_s, max(longest_s, took_s)


def name_of(handle: asyncio.Handle) -> str:
    """The function that a callback calls, or the coroutine of the task that it goes on with."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    named = owner.get_coro() if isinstance(owner, asyncio.Task) else callback
    return getattr(named, "__qualname__", type(named).__qualname__)
