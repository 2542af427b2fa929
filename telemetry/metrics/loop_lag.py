"""Measures how late an event loop wakes up. Every message through the loop waits as long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self


class EventLoopLag:
    """Measures how late the running event loop wakes up; an asynchronous context manager."""

    def __init__(self, observe: Callable[[float], None], interval_s: float = 0.1) -> None:
        self._observe = observe
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begins to measure, on the running loop."""
        self._task = asyncio.create_task(self._measure(), name="event-loop-lag")

    def stop(self) -> None:
        """Ends the measuring."""
        if self._task is not None:
            self._task.cancel()

    async def _measure(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self._observe(max(0.0, loop.time() - due_s))
