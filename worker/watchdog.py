"""Ends a worker if its step loop or transfer thread is stuck, or its device is lost.

A new process can serve then, and this one cannot.

1. WATCHING: the watchdog looks at the progress counters of the step loop and the transfer thread
   all the time. A step that was announced as long gets that much longer.
2. HUNG: one counter has stood still for `step_timeout_s`. Health says NOT_SERVING, the load report
   says that the worker drains, every thread's stack goes to the log, and the process exits.
3. STUCK: the watchdog itself gets no turn, because the event loop hangs or something holds the GIL.
   The interpreter's own timer, which needs no Python thread, dumps the stacks and exits.

A process that was stopped from outside (SIGSTOP) and woken again is neither HUNG nor STUCK. Nothing
in it could run, so the time counts from its waking. The timer of 3 cannot tell the difference: it
ends a process that slept longer than the timer waits.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final

from engine.types import EngineLoad

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.25
SLEPT_S: Final = 2.0
"""If a look comes this much too late, the process or its machine was stopped."""
LAST_WORDS_S: Final = 0.5
"""Routers get this long to hear that this worker takes no more work."""
STUCK_AFTER: Final = 2.0
"""The interpreter's timer waits for this many step timeouts."""
STDERR: Final = 2
"""File descriptor: a hung interpreter cannot be trusted with its own objects."""
EXIT_HUNG: Final = 3
"""Status of the process after a step or turn that did not end; documented."""
EXIT_DEVICE_LOST: Final = 4
"""Status of the process after an error of the device or in the step loop; documented."""

StopServing = Callable[[], Awaitable[None]]


class _Pulse:
    """A counter that ought to move."""

    def __init__(self) -> None:
        self._count = -1
        self._alive_until_s = 0.0

    def stands_still(self, count: int, now_s: float, slept_s: float, allowed_s: float) -> bool:
        """Whether it has stood still for longer than was allowed when it last moved."""
        if count != self._count:
            self._count = count
            self._alive_until_s = now_s + allowed_s
        elif slept_s > SLEPT_S:
            self._alive_until_s += slept_s
        return now_s >= self._alive_until_s


class Watchdog:
    """Watches the step loop and the transfer thread from the event loop."""

    def __init__(
        self,
        load: Callable[[], EngineLoad],
        transfer_turns: Callable[[], int],
        stop_serving: StopServing,
        step_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._transfer_turns = transfer_turns
        self._stop_serving = stop_serving
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._steps, self._transfers = _Pulse(), _Pulse()
        self._looked_s = clock()

    def hung(self) -> str:
        """Names the part that has stood still for too long; "" if all move. Ask it all the time."""
        load, now_s, allowed_s = self._load(), self._clock(), self._step_timeout_s
        slept_s = now_s - self._looked_s - LOOK_EVERY_S
        self._looked_s = now_s
        transfer_hangs = self._transfers.stands_still(
            self._transfer_turns(), now_s, slept_s, allowed_s
        )
        step_s = allowed_s + load.long_step_ms / 1e3
        if self._steps.stands_still(load.progress, now_s, slept_s, step_s):
            return "a step"
        return "the transfer thread" if transfer_hangs else ""

    async def watch(self) -> None:
        """Watches until it is cancelled or ends the process."""
        try:
            while not (hung := self.hung()):
                self._wind_timer()
                await asyncio.sleep(LOOK_EVERY_S)
            details = {"step_timeout_s": self._step_timeout_s}
            logger.error(f"{hung} hangs: this worker ends", extra=details)
            await self._stop_serving()
            await asyncio.sleep(LAST_WORDS_S)
        except asyncio.CancelledError:
            faulthandler.cancel_dump_traceback_later()
            raise
        dump_and_exit(EXIT_HUNG)

    def _wind_timer(self) -> None:
        """Winds up the timer of 3, which goes off unless this is called again in time."""
        announced_s = self._load().long_step_ms / 1e3
        after_s = STUCK_AFTER * self._step_timeout_s + announced_s
        faulthandler.dump_traceback_later(after_s, exit=True, file=STDERR)


def device_lost() -> None:
    """Ends the process at once, on any thread. Its routers see the stream break."""
    logger.error("no step runs any more: this worker ends")
    os._exit(EXIT_DEVICE_LOST)


def dump_and_exit(code: int) -> None:
    """Dumps every thread's stack to standard error, which is the log, and exits."""
    faulthandler.dump_traceback(file=STDERR, all_threads=True)
    os._exit(code)
