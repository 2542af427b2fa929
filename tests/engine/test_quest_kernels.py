"""The kernels of Quest, and of attention that reads what it chooses, in Triton's interpreter.
`test_cuda_quest.py` has what needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hooks_kit import QUEST

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for GPUs")


def test_the_interpreter_gives_what_pytorch_gives() -> None:
    script = Path(__file__).with_name("interpreted_quest.py")
    places = os.pathsep.join((str(script.parent.parent.parent), str(QUEST)))
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "all equal"
