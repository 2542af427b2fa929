"""An event loop on a thread of its own, for callers that have none.

Life: made, and it runs -> `close`: what runs on it is cancelled and waited for, nothing new is
taken -> `stop`: the thread ends. Any other thread may call; only `stop` must come last.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from baton.event_loop import loop_factory

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
            RuntimeError: the loop is closed, or this process is a fork of the one that has it.
        """
        if os.getpid() != self._process:  # The lock may have been held when it was forked.
            coroutine.close()
            raise RuntimeError("forked: it runs in the process that made it, and in no other")
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise RuntimeError("closed: it takes no more work")

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises. A caller that is interrupted cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancels what runs, and returns when it has ended."""
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
