"""What the tests of real processes are told where one cannot be started."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nursery
import pytest


def test_a_nursery_that_does_not_answer_is_ended_and_says_how_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nursery, "ANSWER_S", 0.5)
    silent = nursery.Nursery(["-c", "import sys; sys.stdin.read()"])
    with pytest.raises(AssertionError, match=r"no answer within 0.5 s .*--help(.|\n)*'status'"):
        silent.start([sys.executable, "-m", "baton", "--help"], os.environ, tmp_path / "log")
    silent.close()
    assert silent.has_ended


def test_several_threads_may_wait_for_a_child() -> None:
    """The parent gives the exit code once."""

    def code_of(pid: int) -> int:
        time.sleep(0.1)
        return os.waitpid(pid, 0)[1]

    child = nursery.Child(os.posix_spawn("/bin/true", ["true"], os.environ), code_of)
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(child.wait, [5] * 4)) == {0}
    child.kill()
