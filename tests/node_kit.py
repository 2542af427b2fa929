"""Runs the scenarios of `tests/node`: a client in Node, from `protos/` alone."""

from __future__ import annotations

import hashlib
import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import debian

FOLDER = Path(__file__).resolve().parent / "node"
INSTALL_S = 400
SCENARIO_S = 30


def run_scenario(name: str, address: str) -> dict[str, Any]:
    """What came of a scenario of `scenario.mjs` against the router at the address."""
    return run_program("scenario.mjs", name, address)


def run_program(
    program: str, *arguments: str, folder: Path = FOLDER, timeout_s: float = SCENARIO_S
) -> dict[str, Any]:
    """The JSON that a program of a folder writes, with the packages that its lock file names."""
    install(folder)
    command = [debian.program("node"), str(folder / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@cache
def install(folder: Path = FOLDER) -> None:
    """Installs what the lock file names, once a version of it; skips where that cannot be."""
    npm = debian.program("npm")
    digest = hashlib.sha256((folder / "package-lock.json").read_bytes()).hexdigest()
    stamp = folder / "node_modules" / f".installed-{digest[:16]}"
    if stamp.exists():
        return
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(
        [npm, "ci", *quiet],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    if done.returncode != 0:
        debian.give_up(f"npm ci fails here: {done.stderr[-500:]}")
    stamp.touch()
