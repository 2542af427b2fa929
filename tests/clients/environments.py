"""Environments of clients that others wrote: each has one of its own, which is made once.

They lie below Baton's cache folder, named after what is in them. Where pip cannot make one, its
test is skipped.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from serving.installing import TORCH_INDEX
from serving.models.demo_model import cache_folder

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints-cpu.txt"
INSTALL_S = 900


@cache
def folder_of(*requirements: str) -> Path:
    """The `bin` folder of an environment with these requirements."""
    content = "\n".join((*requirements, CONSTRAINTS.read_text(), sys.version))
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    folder = cache_folder() / "test-clients" / f"{_word(requirements[0])}-{digest}"
    if (folder / ".made").exists():
        return folder / "bin"
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    _run(*pip, "-c", str(CONSTRAINTS), *_index(), *requirements)
    (folder / ".made").touch()
    return folder / "bin"


def _word(requirement: str) -> str:
    return "".join(letter for letter in requirement if letter.isalnum() or letter in "-_")


@cache
def _index() -> tuple[str, ...]:
    """Names the index of CPU builds of torch, unless pip's own sources have one."""
    asked = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    asked += ["--no-deps", "--report", "-", "-c", str(CONSTRAINTS), "torch"]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    return () if "+cpu" in told.stdout else ("--extra-index-url", TORCH_INDEX)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode == 0:
        return
    pytest.skip(f"{' '.join(command[:5])} fails here: {done.stderr[-500:]}")
