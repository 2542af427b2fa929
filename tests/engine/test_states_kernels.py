"""The kernels of states, in Triton's interpreter. `test_cuda_states.py` has what needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for GPUs")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "family"),
    [
        ("interpreted_states.py", "qwen3_5"),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in (
                ("interpreted_states.py", "qwen3_next"),
                ("interpreted_states.py", "granite4"),
                ("interpreted_states.py", "granite4_experts"),
                ("interpreted_executor.py", "qwen3_5"),
                ("interpreted_executor.py", "granite4"),
            )
        ),
    ],
)
def test_the_interpreter_gives_what_the_reference_gives(script, family, tmp_path):
    path = Path(__file__).with_name(script)
    folders = path.parent, path.parent.parent, path.parent.parent.parent
    done = subprocess.run(
        [sys.executable, path, tmp_path, family],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("equal")
