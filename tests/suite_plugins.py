"""What a run of the suite tells of itself, and which of its slow tests come first.

`Files` measures each file. `Progress` says how far a long run is, and how long the rest will take.
`Turn` orders the tests for a run that has some minutes only: it begins with one tenth of them, and
goes on with the next ones while there is time. Each commit begins with another tenth, so ten in a
row run everything. Every other round goes through a tenth from behind, for the tests that an
earlier run did not reach. `drawn` takes some rows of a long table into `make test`.
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent
FILES_KEY: Final = "baton/files"
"""Of pytest's cache: by file, CPU seconds, seconds and number of tests."""
TENTHS: Final = 10
MOST_IN_PIECE: Final = 8
"""Tests of one function that stay together, since they may share what they need."""
PRINT_EVERY_S: Final = 30.0
FEW: Final = 10
"""So many tests tell nothing of how long the others take."""


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended, seconds."""
    return sum(os.times()[:4])


def function_of(item: pytest.Item) -> str:
    """The test without its parameters."""
    return item.nodeid.partition("[")[0]


class Files:
    """CPU and time of each file, fixtures included. The end of a run writes them to the cache."""

    def __init__(self) -> None:
        self._files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began_s, cpu_before_s = time.monotonic(), cpu_s()
        result = yield
        file = self._files[item.nodeid.partition("::")[0]]
        spent = cpu_s() - cpu_before_s, time.monotonic() - began_s, 1
        file[:] = [old + new for old, new in zip(file, spent, strict=True)]
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (cache := getattr(session.config, "cache", None)) is not None:
            cache.set(FILES_KEY, self._files)


class Progress:
    """Tells now and then how far the run is, and at its end how long each kind of tests took.

    A test that is left is expected to take as long as those of its function took so far on average,
    or if there were none, as long as all others.

    Args:
        terminal: where it tells.
        is_whole: the run has no limit; else nothing is said of the rest.
    """

    def __init__(self, terminal: pytest.TerminalReporter, *, is_whole: bool) -> None:
        self._terminal = terminal
        self._is_whole = is_whole
        self._began_s = self._told_s = time.monotonic()
        self._left: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        """Seconds by marker."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._left.update(map(function_of, session.items))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began_s, name = time.monotonic(), function_of(item)
        result = yield
        now_s = time.monotonic()
        self._left[name] -= 1
        self._done[name] += 1
        self._seconds[name] += now_s - began_s
        for kind in ("matrix", "slow", "clients"):
            if item.get_closest_marker(kind):
                self._kinds[kind] += now_s - began_s
                break
        done, left = self._done.total(), self._left.total()
        if self._is_whole and now_s - self._told_s > PRINT_EVERY_S and done > FEW:
            self._told_s = now_s
            self._terminal.ensure_newline()
            self._terminal.write_line(
                f"{done} of {done + left} tests after {(now_s - self._began_s) / 60:.0f} min; "
                f"the rest takes about {self.rest_s() / 60:.0f} min"
            )
        return result

    def rest_s(self) -> float:
        """How long the tests that are left will take, seconds."""
        usual_s = self._seconds.total() / max(1, self._done.total())
        return sum(
            count * (self._seconds[name] / self._done[name] if self._done[name] else usual_s)
            for name, count in self._left.items()
        )

    def pytest_terminal_summary(self) -> None:
        spent = (f"{kind} {seconds / 60:.1f} min" for kind, seconds in self._kinds.items())
        self._terminal.write_line(f"spent on: {', '.join(spent) or 'nothing slow'}")


class Turn:
    """Orders the tests of a run that has some minutes, and skips what it does not reach.

    A test that was begun runs to its end: it has a limit of its own.

    Args:
        number: of the turn; the next one begins with the next tenth.
        minutes: after which no test is begun.
    """

    def __init__(self, number: int, minutes: float) -> None:
        self._number = number
        self._minutes = minutes
        self._ends_s = time.monotonic() + 60 * minutes
        self._items = 0
        self._missed: Counter[str] = Counter()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = in_turn(items, self._number)
        self._items = len(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self._ends_s:
            self._missed[function_of(item)] += 1
            pytest.skip("not reached")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"turn {self._number}: {self._missed.total()} of {self._items} tests not reached in "
            f"{self._minutes:g} minutes"
        )
        for name, count in sorted(self._missed.items()):
            terminalreporter.write_line(f"not reached: {name} ({count})")


def in_turn(items: Sequence[pytest.Item], number: int) -> list[pytest.Item]:
    """All items, the tenth of that turn first and then the tenths behind it. A tenth has every
    tenth piece, so that all take about as long."""
    pieces: list[list[pytest.Item]] = []
    for _, same in groupby(items, function_of):
        run = list(same)
        pieces += [run[at : at + MOST_IN_PIECE] for at in range(0, len(run), MOST_IN_PIECE)]
    rounds, first = divmod(number, TENTHS)
    tenths = [pieces[(first + tenth) % TENTHS :: TENTHS] for tenth in range(TENTHS)]
    if rounds % 2:
        tenths = [tenth[::-1] for tenth in tenths]
    return list(chain.from_iterable(chain.from_iterable(tenths)))


def drawn(rows: Iterable[Any], count: int) -> list[Any]:
    """Rows of `parametrize`: so many of them, others with each commit, and the rest for
    `--slow`."""
    every = list(rows)
    chosen = {(this_turn() * count + at) % len(every) for at in range(count)}
    return [row if at in chosen else _slow(row) for at, row in enumerate(every)]


def _slow(row: Any) -> Any:
    values = row if isinstance(row, tuple) else (row,)
    return pytest.param(*values, marks=pytest.mark.slow)


@functools.cache
def this_turn() -> int:
    """The number of commits, or where the history is cut, the last one's hash."""

    def git(*words: str) -> str:
        told = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return told.stdout.strip()

    if git("rev-parse", "--is-shallow-repository") == "false":
        return int(git("rev-list", "--count", "HEAD"))
    return int(git("rev-parse", "HEAD") or "0", 16)
