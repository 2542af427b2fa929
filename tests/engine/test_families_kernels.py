"""The fused forward pass of every family, and attention with kernels of our own, in Triton's
interpreter. `test_cuda_engine.py` has what needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_families import FUSED, LATENTS

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for GPUs")

pytestmark = pytest.mark.timeout(600)
QUICK = ("llama", "halves", "attention", "experts", "experts-fp8", "experts-mxfp4")
"""Kernels of Llama, and those of one row through experts, are counted."""
MATRIX = ("mixes", "biases", "gelu", "odd", "mistral", "qwen3", *FUSED, *LATENTS)


@pytest.mark.parametrize("cases", [QUICK, pytest.param(MATRIX, marks=pytest.mark.matrix)])
def test_the_interpreter_gives_what_the_decoder_gives(cases, tmp_path):
    script = Path(__file__).with_name("interpreted_forward.py")
    tests = script.parent.parent
    places = os.pathsep.join(map(str, (tests.parent, tests, tests / "engine")))
    done = subprocess.run(
        [sys.executable, script, tmp_path, *cases],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:-1] == [f"{case} equal" for case in cases]
