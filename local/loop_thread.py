"""Runs an event loop on a thread of its own, for callers without one.

Life: it runs from the start. `close` cancels running coroutines, waits for their end, and refuses
new ones. `stop` ends the thread. Any other thread may call any method; `stop` must come last.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from serving.event_loop import loop_factory

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for other threads."""

    def __init__(self, name: str) -> None:
        self._loop = (loop_factory() or asyncio.new_event_loop)()
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine. Cancelling the future cancels it.

        Raises:
            RuntimeError: the loop is closed, or this process is a fork of the loop's process.
        """
        if os.getpid() != self._process:  # In a fork the lock may be held for ever.
            coroutine.close()
            raise RuntimeError("forked: it runs in the process that made it, and in no other")
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise RuntimeError("closed: it takes no more work")

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns or raises the coroutine's result. An interrupted caller cancels the coroutine."""
        future = self.submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancels running coroutines. Returns when they have ended."""
        with self._lock:
            self._closed = True
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()

    def stop(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
