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
    script = Path(__file__).with_name("speculation_checks.py")
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(script.parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) >= 5


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_kernels(check):
    check()
