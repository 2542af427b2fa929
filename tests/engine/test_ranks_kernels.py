"""Kernels over memory that ranks share, in Triton's interpreter. What needs GPUs is in
`test_cuda_ranks.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for GPUs")

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("cases", [(), pytest.param(("all",), marks=pytest.mark.slow)])
def test_the_interpreter_gives_the_sums(cases):
    script = Path(__file__).with_name("interpreted_ranks.py")
    tests = script.parent.parent
    places = os.pathsep.join(map(str, (tests.parent, tests, tests / "engine")))
    done = subprocess.run(
        [sys.executable, script, *cases],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "equal\n"
