"""Ends the process of a test that goes on for long after its limit.

pytest-timeout raises an error in the main thread at a test's limit. An event loop or a task may
swallow it, and pytest-timeout sets no second alarm. `HardEnd` looks from a thread of its own. It
prints what all threads and tasks do, names the test as failed, and ends this process with all that
it has started: whoever reads its output would wait for those, too.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final, NoReturn

import psutil
import pytest

GRACE_S: Final = 60.0
"""Time from a test's limit to its end. Fixtures that end a cluster get 30 s."""
LOOK_S: Final = 0.5
_now_s = time.monotonic
"""As it is: tests put virtual clocks in the place of `time.monotonic`."""
FAILED: Final = 1
"""pytest's status where tests failed."""


class HardEnd:
    """A plugin. Register it once for a session.

    Args:
        grace_s: time from a test's limit to the end of the process.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._ends: tuple[float, pytest.Item] | None = None
        """When the running test has to be over, and the test."""

    def pytest_sessionstart(self) -> None:
        threading.Thread(target=self._watch, name="hard-end", daemon=True).start()

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> None:
        """Called with the limit of each test that has one."""
        if not item.config.getoption("usepdb"):
            self._ends = _now_s() + settings.timeout + self._grace_s, item

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._ends = None

    def pytest_enter_pdb(self) -> None:
        self._ends = None

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            ends = self._ends
            if ends is not None and _now_s() > ends[0]:
                self._end(ends[1])

    def _end(self, item: pytest.Item) -> NoReturn:
        out = sys.__stdout__
        assert out is not None
        why = f"did not end within {self._grace_s:g} s behind its limit; no test ran after it"
        failed = f"\nFAILED {item.nodeid} - {why}"
        try:
            if capture := item.config.pluginmanager.getplugin("capturemanager"):
                capture.suspend_global_capture(in_=True)
                print("\n", *capture.read_global_capture(), sep="\n", file=out)
            print(failed, file=out, flush=True)
            print_stacks(out)  # Last, for a task may change while it is printed.
            print(failed, file=out, flush=True)
        finally:
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            os._exit(FAILED)


def print_stacks(out: Any) -> None:
    """Prints what each thread and each task does."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            print(f"\nthread {names.get(ident, ident)}:", file=out)
            traceback.print_stack(frame, file=out)
    # Asked of their types: to ask a weak reference to what is gone is an error.
    for task in [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task)]:
        if not task.done():
            print(f"\ntask {task.get_name()}:", file=out)
            task.print_stack(file=out)
