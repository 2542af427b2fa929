"""The kernels of FP8 KV, in Triton's interpreter. `test_cuda_fp8_kv.py` has what needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for GPUs")


@pytest.mark.parametrize("which", ["one", pytest.param("all", marks=pytest.mark.matrix)])
def test_the_interpreter_gives_what_the_pool_and_float64_give(which: str) -> None:
    script = Path(__file__).with_name("interpreted_kernels.py")
    root = str(script.parent.parent.parent)
    done = subprocess.run(
        [sys.executable, script, which],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "all equal"
