"""Shows how far a worker has loaded its model: by a bar on a terminal, by lines in a log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Takes the phase, the parts done and the number of parts."""


def terminal(log_format: str) -> Console | None:
    """The terminal on standard error; None if it is a pipe, or if the log format is not `text`.

    With FORCE_COLOR set, rich by itself would take a pipe for a terminal.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if log_format != "text" or not sys.stderr.isatty() or console.is_dumb_terminal:
        return None
    return console


@contextmanager
def loading_progress(console: Console | None) -> Iterator[Progress]:
    """Yields a callback that shows each phase: a bar on `console`, or log lines at each quarter."""
    if console is None:
        yield _quarters()
        return
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}

    def progress(phase: str, done: int, total: int) -> None:
        if phase not in tasks:
            tasks[phase] = bars.add_task(phase, total=total)
        bars.update(tasks[phase], completed=done, total=total)

    with _logs_following_stderr() as follow, Progress(*columns, console=console) as bars:
        follow()
        yield progress


@contextmanager
def _logs_following_stderr() -> Iterator[Callable[[], None]]:
    """Lets log lines appear above the bars of rich.

    While rich draws, it replaces standard error, but log handlers still hold the real one. Calling
    the yielded function moves them to the replacement. The exit moves them back.
    """
    before = sys.stderr
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is before
    ]

    def follow() -> None:
        for handler in handlers:
            handler.setStream(sys.stderr)

    try:
        yield follow
    finally:
        for handler in handlers:
            handler.setStream(before)


def _quarters() -> Progress:
    reported: set[tuple[str, int]] = set()

    def progress(phase: str, done: int, total: int) -> None:
        quarter = 4 * done // max(1, total)
        if (phase, quarter) not in reported:
            reported.add((phase, quarter))
            logger.info("loading", extra={"phase": phase, "percent": 25 * quarter})

    return progress
