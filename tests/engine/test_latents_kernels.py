"""The kernels of latents, in Triton's interpreter. `test_cuda_latents.py` has what needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for GPUs")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", ["one", pytest.param("all", marks=pytest.mark.matrix)])
def test_the_interpreter_gives_what_float64_gives(which: str) -> None:
    script = Path(__file__).with_name("interpreted_latents.py")
    root = str(script.parent.parent.parent)
    done = subprocess.run(
        [sys.executable, script, which],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "all equal"
