"""Output of the command line: results go to stdout, all else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from serving.models import demo_model

stdout: Final = Console(highlight=False, soft_wrap=True)
stderr: Final = Console(stderr=True, highlight=False, soft_wrap=True)

_COLOURS: Final = ("cyan", "magenta", "green", "yellow", "blue", "bright_cyan", "bright_magenta")


def merged_log(names: list[str]) -> Callable[[str, str], None]:
    """Makes a function that prints a line behind its process's name, in the process's colour."""
    width = max(map(len, names))
    colours = dict(zip(names, cycle(_COLOURS), strict=False))

    def write(name: str, line: str) -> None:
        stdout.print(Text.assemble((f"{name:>{width}} │ ", colours[name]), Text.from_ansi(line)))

    return write


def mend_streams() -> None:
    """Lets output that is closed drop what is written, and output of a narrow encoding escape what
    that lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, TextIOWrapper) and not stream.encoding.startswith("utf"):
            stream.reconfigure(errors="backslashreplace")


def silence() -> None:
    """Drops all further output, for when its reader has gone."""
    stdout.quiet = stderr.quiet = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())


@contextmanager
def model_progress() -> Iterator[demo_model.Progress]:
    """Yields a progress bar for `demo_model.ensure`. It appears only if there is work to do."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=stderr, transient=True)
    tasks: dict[str, TaskID] = {}

    def report(doing: str, share: float | None) -> None:
        if doing not in tasks:
            bar.start()
            for done in tasks.values():
                bar.update(done, total=1, completed=1)
            tasks[doing] = bar.add_task(doing, total=None)
            if not stderr.is_terminal:
                stderr.print(f"{doing} ...")
        bar.update(tasks[doing], total=None if share is None else 1, completed=share or 0)

    try:
        yield report
    finally:
        if tasks:
            bar.stop()


def print_json(value: object) -> None:
    """Prints one JSON object on one line of stdout."""
    stdout.print(json.dumps(value, ensure_ascii=False), markup=False)


def rounded(value: Any) -> Any:
    """Rounds all floats in nested dicts and lists to four decimals."""
    match value:
        case float():
            return round(value, 4)
        case Mapping():
            return {key: rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [rounded(item) for item in value]
        case _:
            return value
