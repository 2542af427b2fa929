"""Where the time of an event loop's thread goes, by looks at its stack.

The kernel's timer of CPU time interrupts the process 500 times a second of it, and Python looks at
the stack at its next instruction. A look belongs to the innermost function that is in the table. A
look at a loop that waits for events is another thread's time and counts for nothing.
"""

from __future__ import annotations

import signal
from collections import Counter
from types import FrameType

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
