"""The suite's runner: who fails twice has failed, and who passes on the second try is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from side_by_side import FAILED, FEW, NO_TESTS, Part, main, run

SOUND = "def test_sound(): pass\n"
BROKEN = "def test_broken(): assert False\n"
# Passes from its second run on.
STALLED = """
from pathlib import Path
def test_stalled():
    mark = Path(__file__).with_suffix(".ran")
    seen = mark.exists()
    mark.touch()
    assert seen
"""


def part(folder: Path, name: str, *texts: str) -> Part:
    tests = folder / name
    tests.mkdir()
    (tests / "pytest.ini").write_text("[pytest]\n")
    for number, text in enumerate(texts):
        (tests / f"test_{number}.py").write_text(text)
    return Part(name, ["-q"], folder / "caches" / name, tests)


def test_a_test_that_stalled_once_is_run_again_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([part(tmp_path, "one", SOUND, STALLED), part(tmp_path, "two", SOUND)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "one      PASSED ON THE SECOND TRY ONLY: test_1.py::test_stalled" in lines
    assert any(line.startswith("one      1 passed") for line in lines)


def test_a_test_that_fails_twice_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([part(tmp_path, "one", STALLED, BROKEN), part(tmp_path, "two", SOUND)]) == FAILED
    assert "SECOND TRY ONLY" not in capsys.readouterr().out


def test_many_failures_are_not_tried_again(tmp_path: Path) -> None:
    many = part(tmp_path, "one", *[STALLED] * (FEW + 1))
    assert run([many, part(tmp_path, "two", SOUND)]) == FAILED
    assert many.passed_again == []


def test_a_file_that_cannot_be_read_fails(tmp_path: Path) -> None:
    assert run([part(tmp_path, "one", SOUND, "import nothing_of_this_name\n")]) != 0


# Has another name in every run, so that the one that failed is not found again.
RENAMED = """
import os, pytest
@pytest.mark.parametrize("run", [str(os.getpid())])
def test_renamed(run): assert False
"""


def test_a_failed_test_that_is_not_found_again_has_failed(tmp_path: Path) -> None:
    assert run([part(tmp_path, "one", SOUND, RENAMED), part(tmp_path, "two", SOUND)]) == FAILED


def test_arguments_may_name_tests_beside_one_process() -> None:
    named = "tests/test_side_by_side.py"
    assert main(["--one", "--collect-only", "-q", named]) == 0


def test_one_part_may_have_nothing_to_run(tmp_path: Path) -> None:
    assert run([part(tmp_path, "one"), part(tmp_path, "two", SOUND)]) == 0
    assert run([part(tmp_path, "three"), part(tmp_path, "four")]) == NO_TESTS
    assert run([part(tmp_path, "five")]) == NO_TESTS
