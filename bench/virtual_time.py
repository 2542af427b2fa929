"""Threads in virtual time, for benchmarks that run a step loop as it is.

One thread runs at a time: the world's own, which takes its events in order, or one that it woke.
"""

from __future__ import annotations

import heapq
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from engine.step.plan import StepResult


class World:
    """Virtual time. A thread that waits lets the world go on, until the world wakes it."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = count()
        self._back = threading.Semaphore(0)
        self._own = threading.local()

    def at(self, when_s: float, then: Callable[[], None]) -> None:
        """Has something happen."""
        heapq.heappush(self._events, (when_s, next(self._ticket), then))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Lets everything happen until it is over."""
        while not is_over():
            self.now_s, _, then = heapq.heappop(self._events)
            then()

    def start(self, run: Callable[[], None]) -> None:
        """Runs a thread of the world."""
        begins = threading.Semaphore(0)

        def main() -> None:
            begins.acquire()
            run()
            self._back.release()

        threading.Thread(target=main, daemon=True).start()
        self.at(self.now_s, partial(self._resume, begins))

    def wait(self) -> Callable[[], None]:
        """What wakes the thread that calls this, and then `stand`s."""
        self._own.woken = threading.Semaphore(0)
        return partial(self._resume, self._own.woken)

    def stand(self) -> None:
        """Waits to be woken."""
        self._back.release()
        self._own.woken.acquire()

    def _resume(self, woken: threading.Semaphore) -> None:
        woken.release()
        self._back.acquire()

    # -- as the module `time` ---------------------------------------------------------------

    def monotonic(self) -> float:
        """Seconds."""
        return self.now_s

    def time_ns(self) -> int:
        """Nanoseconds."""
        return int(self.now_s * 1e9)

    def sleep(self, seconds: float) -> None:
        """On a thread of the world."""
        self.at(self.now_s + seconds, self.wait())
        self.stand()


class Inbox:
    """`queue.Queue` of one reader, a thread of the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Any] = deque()
        self._wakes: Callable[[], None] | None = None

    def put(self, item: object) -> None:
        """The reader is woken by an event of its own."""
        self._items.append(item)
        if (wakes := self._wakes) is not None:
            self._world.at(self._world.now_s, partial(self._wake, wakes))

    def get(self, timeout: float | None = None) -> Any:
        """Waits."""
        if not self._items:
            self._wakes = wakes = self._world.wait()
            if timeout is not None:
                self._world.at(self._world.now_s + timeout, partial(self._wake, wakes))
            self._world.stand()
        return self.get_nowait()

    def get_nowait(self) -> Any:
        """Does not wait."""
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def _wake(self, wakes: Callable[[], None]) -> None:
        if self._wakes is wakes:  # Else it was woken by the other.
            self._wakes = None
            wakes()


class Launched:
    """What the step loop reads of a future."""

    def __init__(self, draws: int) -> None:
        self._draws = draws
        self._then: Callable[[Any], None] | None = None

    def add_done_callback(self, then: Callable[[Any], None]) -> None:
        """One is enough."""
        self._then = then

    def end(self) -> None:
        """The device is done."""
        assert self._then is not None, "a step ended before its launch"
        self._then(self)

    def result(self) -> StepResult:
        """One and the same token for all."""
        ones = np.ones(self._draws, np.bool_)
        return StepResult(np.zeros(self._draws, np.int32), ones, None, None, None)
