"""Runs the suite as two pytest processes side by side.

python tests/side_by_side.py [--one] [arguments for pytest]

Tests of whole clusters (`WAITING`) mostly wait for processes, the others mostly compute. So on two
cores both together take little longer than the longer of the two. Lines are shown as they come,
each behind the name of its part. With `--one` there is one process, for tests that load both cores.
Arguments that name tests are run by one process, too, and once.

Many tests hold something to a bound on time, and a machine may stand still for a moment. So where
at most `FEW` tests of a part failed, they are run once more, alone, when both parts have ended. Who
passes then is named at the end as passed on the second try. Who fails twice has failed, and the end
shows pytest's line of it again: of a long run often only the end is kept.

At the end it names the files that took the most CPU time, and says how much the whole run took with
all processes that it started and that have ended.

The exit status is that of the part that fared worse; 0 means that all is well.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from suite_plugins import FILES_KEY

ROOT = Path(__file__).resolve().parent.parent
WAITING = ("tests/e2e", "tests/chaos", "tests/compose")
ONE = "--one"
SLOWEST = 20
"""So many files are named."""
FEW = 3
"""As many tests may fail by a stall; more that fail are a fault."""
MOST_NAMED = 20
"""So many tests that failed are named."""
FAILED = 1
"""pytest's status where tests failed; others stand for a run that was cut short."""
NO_TESTS = 5
"""pytest's status where a selection left nothing to run."""


def names_tests(argument: str) -> bool:
    """Whether an argument is a file, a folder or a test."""
    return not argument.startswith("-") and (ROOT / argument.partition("::")[0]).exists()


class Part:
    """One pytest process, whose lines are passed on as they come.

    Args:
        name: is shown before each line.
        arguments: for pytest.
        cache: folder in which pytest keeps which tests failed.
        root: folder in which pytest runs.
    """

    def __init__(self, name: str, arguments: list[str], cache: Path, root: Path = ROOT) -> None:
        self.name = name
        self.last_line = ""
        self.failures: list[str] = []
        self.passed_again: list[str] = []
        self._arguments = [*arguments, "-o", f"cache_dir={cache}"]
        self._cache = cache
        self._root = root
        self._start()

    def wait(self) -> int:
        """Returns pytest's status."""
        self._reader.join()
        return self._process.wait()

    def try_again(self, status: int) -> int:
        """Runs the tests that failed once more, where they are few.

        Args:
            status: pytest's, of the first run.

        Returns:
            The status that counts.
        """
        failed = self._failed() if status == FAILED else []
        if not 0 < len(failed) <= FEW:
            return status
        print(f"{self.name:8} once more, alone: {', '.join(failed)}", flush=True)
        self._start("--last-failed", "--last-failed-no-failures=none")
        again = self.wait()
        if again != 0:  # Also where nothing was found to run.
            return status
        self.passed_again = failed
        return 0

    def files(self) -> dict[str, list[float]]:
        """CPU seconds, seconds and number of tests of the last run, by file."""
        kept = self._cache / "v" / FILES_KEY
        return json.loads(kept.read_text()) if kept.exists() else {}

    def _start(self, *more: str) -> None:
        self.failures = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *self._arguments, *more],
            cwd=self._root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._pass_on)
        self._reader.start()

    def _failed(self) -> list[str]:
        """Tests of the last run that failed, or whose fixtures did; files that were not read."""
        kept = self._cache / "v/cache/lastfailed"
        return sorted(json.loads(kept.read_text())) if kept.exists() else []

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(f"{self.name:8} {line.rstrip()}", flush=True)
            self.last_line = line.strip() or self.last_line
            if line.startswith(("FAILED ", "ERROR ")):
                self.failures.append(line.strip())


def run(parts: list[Part]) -> int:
    """Waits for parts that were started together, and returns the status of all of them."""
    try:
        statuses = [part.wait() for part in parts]
    except KeyboardInterrupt:  # which both processes got, too: they end by themselves
        statuses = [part.wait() for part in parts]
    files = {name: spent for part in parts for name, spent in part.files().items()}
    statuses = [part.try_again(status) for part, status in zip(parts, statuses, strict=True)]
    print_slowest(files)
    for part in parts:
        print(f"{part.name:8} {part.last_line}")
        for test in part.passed_again:
            print(f"{part.name:8} PASSED ON THE SECOND TRY ONLY: {test}")
        for line in part.failures[:MOST_NAMED]:
            print(f"{part.name:8} {line}")
    if len(parts) > 1 and statuses.count(NO_TESTS) == 1:
        statuses.remove(NO_TESTS)
    return max(map(abs, statuses))


def print_slowest(files: dict[str, list[float]]) -> None:
    """Names the files that took the most CPU time."""
    print(f"the {SLOWEST} slowest files:    CPU s       s  tests")
    slowest = sorted(files.items(), key=lambda file: file[1], reverse=True)[:SLOWEST]
    for name, (cpu_s, wall_s, tests) in slowest:
        print(f"  {name:44} {cpu_s:6.1f} {wall_s:7.1f} {tests:6.0f}")


def main(arguments: list[str]) -> int:
    """Runs both parts, all in one, or what the arguments name."""
    is_one = ONE in arguments
    arguments = [argument for argument in arguments if argument != ONE]
    if any(map(names_tests, arguments)):
        return subprocess.call([sys.executable, "-m", "pytest", *arguments], cwd=ROOT)
    began_s = time.monotonic()
    others = [f"--ignore={folder}" for folder in WAITING]
    if is_one:
        parts = {"all": arguments}
    else:
        parts = {"clusters": [*arguments, *WAITING], "units": [*arguments, *others]}
    with tempfile.TemporaryDirectory() as caches:
        status = run([Part(name, given, Path(caches, name)) for name, given in parts.items()])
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = spent.ru_utime + spent.ru_stime
    print(f"took {time.monotonic() - began_s:.0f} s, and {cpu_s:.0f} s of CPU time")
    return status


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    # Each process that tests start would compile hundreds of modules anew, a half second of CPU.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.exit(main(sys.argv[1:]))
