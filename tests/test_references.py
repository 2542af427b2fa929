"""The stored answers are what transformers says."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import references

HERE = Path(__file__).parent
READERS = (
    "engine/test_engine_fp8_kv.py",
    "engine/test_precision_paths.py",
    "e2e/test_e2e_tokens.py",
    "local/test_llm.py",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stored_answers_are_those_of_transformers() -> None:
    """The tests that read them compute them here, and compare."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "not slow", *(str(HERE / name) for name in READERS)],
        env={**os.environ, "BATON_REFERENCES": "compute"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def test_processes_that_store_answers_lose_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "STORE", tmp_path / "references.json")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_store_ten, range(4))
    stored = json.loads(references.STORE.read_text())
    assert stored == {f"{number}": [number, []] for number in range(40)}


def _store_ten(first: int) -> None:
    for number in range(first, 40, 4):
        references.store(f"{number}", [number, []])
