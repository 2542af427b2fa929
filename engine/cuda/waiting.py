"""Waits for steps that a device runs by itself, and completes their futures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from engine.step.executor import Launched
from engine.step.plan import StepResult

Read = Callable[[], StepResult]
"""Makes the result from pinned memory, once the data is there."""


class DeviceEvent(Protocol):
    """A place in the device's stream."""

    def synchronize(self) -> None:
        """Waits until the device has come there."""
        ...


class _InFlight(NamedTuple):
    """A step that the device runs or will run."""

    done: DeviceEvent
    read: Read
    future: Launched


class StepWaiter:
    """Completes the futures of steps, in order, on a thread of its own.

    The thread sleeps in the driver until a step's event has come, with the interpreter released.
    """

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="baton-step-waiter", daemon=True)
        self._thread.start()

    def add(self, done: DeviceEvent, read: Read, future: Launched) -> Launched:
        """Takes a launched step and its future, which it returns."""
        self._steps.put(_InFlight(done, read, future))
        return future

    def stop(self) -> None:
        """Ends the thread after the steps that it has."""
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                step.done.synchronize()
                result = step.read()
            except BaseException as error:
                step.future.set_exception(error)
            else:
                step.future.set_result(result)
