"""Tests that need more than Python packages say what of Debian brings it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import debian
import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_a_program_that_is_missing_is_named_with_its_package(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"promtool .*: apt-get install prometheus$"):
        debian.program("promtool")
    assert Path(debian.program(Path(sys.executable).name)).exists(), "a package's own program"
    assert debian.missing()[:3] == ["curl", "docker-compose", "gcc"]
    monkeypatch.setitem(debian.LIBRARIES, "libnowhere.so.7", "libnowhere7")
    with pytest.raises(pytest.skip.Exception, match=r"apt-get install .*libnowhere7"):
        debian.libraries()


def test_nothing_is_skipped_in_continuous_integration(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"apt-get install nodejs$"):
        debian.program("node")


def test_the_packages_are_told_before_anything_is_installed(tmp_path) -> None:
    alone = [sys.executable, "-I", "-S", str(ROOT / "tests" / "debian.py")]
    environment = {"PATH": str(tmp_path)}
    told = subprocess.run(alone, capture_output=True, text=True, check=True, env=environment)
    assert {"curl", "gcc", "libc6-dev", "nodejs", "prometheus"} <= {*told.stdout.split()}
    told = subprocess.run(
        [*alone, "--tell"], capture_output=True, text=True, check=True, env=environment
    )
    assert "are skipped: curl docker-compose gcc" in told.stdout
    assert "make install-debian" in told.stdout
    assert "\ninstall-debian:" in (ROOT / "Makefile").read_text()
