"""The suite's runner: who fails twice has failed, and who passes on the second try is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import suite_plugins
from side_by_side import FAILED, FEW, NO_TESTS, Part, main, run
from suite_plugins import TENTHS, drawn, in_turn

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


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts need no plugin of others, which take a second each."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def part(folder: Path, name: str, *texts: str, conftest: str = "") -> Part:
    tests = folder / name
    tests.mkdir()
    (tests / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(__file__).parent}\n")
    (tests / "conftest.py").write_text(conftest)
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
    lines = capsys.readouterr().out.splitlines()
    assert not any("SECOND TRY ONLY" in line for line in lines)
    assert lines[-2].startswith("one      FAILED test_1.py::test_broken - assert False")
    assert lines[-1].startswith("two      1 passed")


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


ENDS_HARD = """
from hard_end import HardEnd
pytest_plugins = ["pytest_timeout"]
def pytest_configure(config):
    config.pluginmanager.register(HardEnd(0.5))
"""
# The alarm comes up in the loop, which cancels its tasks and waits for them.
STANDS = """
import asyncio, subprocess, weakref, pytest
gone = weakref.proxy(set())
async def stands():
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            print("no")
@pytest.mark.timeout(0.5)
def test_stands():
    subprocess.Popen(["sleep", "600"])
    asyncio.run(stands())
"""


def test_a_test_that_swallows_its_limit_ends_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([part(tmp_path, "one", STANDS, SOUND, conftest=ENDS_HARD)]) == FAILED
    told = capsys.readouterr().out
    assert "one      FAILED test_0.py::test_stands - did not end within 0.5 s" in told
    for shown in ("one      thread MainThread:", "one      task Task-", "await asyncio.sleep(600)"):
        assert shown in told
    assert "one      no\n" in told


def test_arguments_may_name_tests_beside_one_process() -> None:
    named = "tests/test_side_by_side.py"
    assert main(["--one", "--collect-only", "-q", named]) == 0


def test_one_part_may_have_nothing_to_run(tmp_path: Path) -> None:
    assert run([part(tmp_path, "one"), part(tmp_path, "two", SOUND)]) == 0
    assert run([part(tmp_path, "three"), part(tmp_path, "four")]) == NO_TESTS
    assert run([part(tmp_path, "five")]) == NO_TESTS


def test_ten_turns_in_a_row_begin_with_everything() -> None:
    names = [f"test_{file}.py::test_{file}[{case}]" for file in range(70) for case in range(file)]
    items = [SimpleNamespace(nodeid=name) for name in names]
    for first in (0, 7, 1234):
        turns = [in_turn(items, first + turn) for turn in range(TENTHS)]
        assert all(sorted(map(id, turn)) == sorted(map(id, items)) for turn in turns)
        begun = {item.nodeid for turn in turns for item in turn[: len(items) // 8]}
        assert begun == set(names)


TURN = """
from suite_plugins import Turn
def pytest_configure(config): config.pluginmanager.register(Turn(number=3, minutes={minutes}))
"""


@pytest.mark.parametrize(("minutes", "told"), [(0, "1 of 1"), (9, "0 of 1")])
def test_what_a_turn_does_not_reach_is_named_and_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], minutes: int, told: str
) -> None:
    one = part(tmp_path, "one", BROKEN, conftest=TURN.format(minutes=minutes))
    assert run([one]) == int(minutes > 0)
    shown = capsys.readouterr().out
    assert f"turn 3: {told} tests not reached in {minutes} minutes" in shown
    assert ("not reached: test_0.py::test_broken (1)" in shown) == (minutes == 0)


def test_every_row_is_drawn_once_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = []
    for turn in range(7, 12):
        monkeypatch.setattr(suite_plugins, "this_turn", lambda turn=turn: turn)
        rows = drawn(range(10), 2)
        quick += [row for row in rows if isinstance(row, int)]
        assert [row if isinstance(row, int) else row.values[0] for row in rows] == [*range(10)]
    assert sorted(quick) == [*range(10)]
