"""Runs the suite as two pytest processes side by side.

python tests/side_by_side.py [arguments for pytest]

Tests of whole clusters (`WAITING`) mostly wait for processes, the others mostly compute. So on two
cores both together take little longer than the longer of the two. Lines are shown as they come,
each behind the name of its part. Arguments that name tests are run by one process.

The exit status is that of the part that fared worse; 0 means that all is well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WAITING = ("tests/e2e", "tests/chaos", "tests/compose")
NO_TESTS = 5
"""pytest's status where a selection left nothing to run."""


def names_tests(argument: str) -> bool:
    """Whether an argument is a file, a folder or a test."""
    return not argument.startswith("-") and (ROOT / argument.partition("::")[0]).exists()


class Part:
    """One pytest process, whose lines are passed on as they come."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name = name
        self.last_line = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._pass_on)
        self._reader.start()

    def wait(self) -> int:
        """Returns pytest's status."""
        self._reader.join()
        return self._process.wait()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"{self.name:8} {line.rstrip()}", flush=True)
            self.last_line = line.strip() or self.last_line


def main(arguments: list[str]) -> int:
    """Runs both parts, or what the arguments name."""
    if any(map(names_tests, arguments)):
        return subprocess.call([sys.executable, "-m", "pytest", *arguments], cwd=ROOT)
    began_s = time.monotonic()
    others = [f"--ignore={folder}" for folder in WAITING]
    parts = [Part("clusters", [*arguments, *WAITING]), Part("units", [*arguments, *others])]
    try:
        statuses = [part.wait() for part in parts]
    except KeyboardInterrupt:  # which both processes got, too: they end by themselves
        statuses = [part.wait() for part in parts]
    for part in parts:
        print(f"{part.name:8} {part.last_line}")
    print(f"both in {time.monotonic() - began_s:.0f} s")
    if statuses.count(NO_TESTS) == 1:
        statuses.remove(NO_TESTS)
    return max(map(abs, statuses))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main(sys.argv[1:]))
