"""Folders of ranks: those of killed processes go at the next start, and nobody else's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine.hosts import folder
from engine.hosts.folder import PREFIX, PrivateFolder

KILLED = """
import os, signal
from engine.hosts.folder import PrivateFolder
path = PrivateFolder().path
(path / "store").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""
ROOT = Path(folder.__file__).parents[2]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def kill_one(there: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(there), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED]
    ended = subprocess.run(command, env=environment, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL


def test_a_start_removes_what_killed_processes_left(there: Path) -> None:
    kill_one(there)
    (left,) = there.iterdir()
    used = PrivateFolder()
    assert [*there.iterdir()] == [used.path]
    assert left != used.path
    assert used.path.stat().st_mode & 0o777 == 0o700
    other = PrivateFolder()
    assert {*there.iterdir()} == {used.path, other.path}
    for one in (used, other, used):
        one.remove()
    assert not [*there.iterdir()]


def test_a_start_needs_no_list_of_the_folder() -> None:
    """With mode 1733 users see nothing of each other there."""
    there = Path(tempfile.mkdtemp())
    there.chmod(0o1733)
    script = f"{KILLED}".replace("\npath", "\nos.setuid(os.getuid() or 65534)\npath")
    environment = {**os.environ, "TMPDIR": str(there), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    try:
        ended = subprocess.run(command, env=environment, check=False, timeout=60)
        assert ended.returncode == -signal.SIGKILL
    finally:
        there.chmod(0o700)
        shutil.rmtree(there)


def test_what_is_not_known_to_be_left_stays(
    there: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "owner").touch()
    (there / f"{PREFIX}link").symlink_to(elsewhere)
    (there / f"{PREFIX}file").touch()
    for name in (f"{PREFIX}no-lock", "another"):
        (there / name).mkdir()
    (there / "another/owner").touch()
    kill_one(there)
    before = {*there.iterdir()}
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    folder.remove_left()
    assert {*there.iterdir()} == before, "they are another user's"
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(there))
    folder.remove_left()
    assert len(before - {*there.iterdir()}) == 1
    assert (elsewhere / "owner").exists()
