"""Calls hooks, so that one that raises or takes too long harms its own requests alone."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final, TypeVar

from engine.step.hooks import Hook, HookFailure

log = logging.getLogger("baton.engine")

Result = TypeVar("Result")
Check = Callable[[object], Result | None]
LOG_AGAIN_S: Final = 10.0
"""A failure at a point is logged once in so many seconds."""


def _nothing(_result: object) -> None:
    """What most methods return."""


Failures = Callable[[], tuple[HookFailure, ...]]
"""Returns the failures of a step, once the device is done with it."""


class Caller:
    """Calls one hook on one thread, and measures its time since `restart`."""

    def __init__(self, index: int, hook: Hook, limit_s: float) -> None:
        self.index = index
        self.hook = hook
        self.failure: HookFailure | None = None
        """Since `restart`."""
        self._limit_s = limit_s
        self._spent_s = 0.0
        self._logged_s: dict[str, float] = {}

    def restart(self, *, is_limited: bool = True) -> None:
        """A new step, or a new request. Or a capture, where kernels are compiled."""
        self.failure, self._spent_s = None, 0.0 if is_limited else -math.inf

    def call(
        self, point: Callable[..., object], *args: object, check: Check[Result] = _nothing
    ) -> Result | None:
        """Calls a method of the hook. None, too, if it has failed.

        Args:
            point: the method.
            args: its arguments.
            check: what it returns goes through this, which raises if it is not as it must be.
        """
        if self.failure is not None:
            return None
        began_s = time.monotonic()
        try:
            result = check(point(*args))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # A SystemExit would end the thread that runs all steps.
            self.fail(point.__name__, error)
            return None
        self._spent_s += time.monotonic() - began_s
        if self._spent_s > self._limit_s:
            self.fail(point.__name__)
            return None
        return result

    def fail(self, point: str, error: BaseException | None = None) -> None:
        """Notes a failure at `point`: an error, or its time is up."""
        self.failure = self.logged(point, error)

    def logged(self, point: str, error: BaseException | None = None) -> HookFailure:
        """Logs a failure. One of a step that is over is not noted: the hook may be in the next."""
        failure = HookFailure(self.index, self.hook.name, point)
        now_s = time.monotonic()
        if now_s - self._logged_s.get(point, -LOG_AGAIN_S) < LOG_AGAIN_S:
            return failure
        self._logged_s[point] = now_s
        if error is None:
            words = "hook %s is too slow: more than %g s, found in %s"
            log.error(words, self.hook.name, self._limit_s, point)
        else:
            log.error("hook %s raised in %s", self.hook.name, point, exc_info=error)
        return failure
