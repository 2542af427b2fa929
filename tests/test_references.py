"""The stored answers are what transformers says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
READERS = (
    "engine/test_engine_demo_model.py",
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
