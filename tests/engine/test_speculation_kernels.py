"""The kernels of verify steps, against `engine.speculation`, noise on the host and a rule written
out: in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for GPUs")

if torch.cuda.is_available():
    import speculation_checks as checks

    CHECKS = checks.CHECKS
else:
    CHECKS = []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them itself")
def test_kernels_in_the_interpreter():
    assert len(interpreted("speculation_checks").split()) >= 5


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_engines_in_the_interpreter(tmp_path):
    """Whole engines on the executor of a GPU: hidden states, tokens, drafts."""
    cases = ("plain", "pools", "drafts", "suffix", "beams")
    told = interpreted("interpreted_executor", str(tmp_path), *cases)
    assert told.splitlines() == [f"{case} equal" for case in cases]


def interpreted(name: str, *arguments: str) -> str:
    script = Path(__file__).with_name(f"{name}.py")
    places = os.pathsep.join(map(str, (*script.parents[1:3], script.parent)))
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_kernels(check):
    check()
