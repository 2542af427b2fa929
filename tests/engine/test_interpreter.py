"""Kernels in Triton's interpreter: each script compares some with the same written out. What needs
a GPU is in `test_cuda_*`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fp8_checks
import pytest
import torch
from hooks_kit import QUEST
from tiny_families import FUSED, LATENTS

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for GPUs")

pytestmark = pytest.mark.timeout(900)
HERE = Path(__file__).parent
FOLDER = "a folder of the test's own"
QUICK = ("llama", "halves", "wrapped-llama", "attention", "experts", "experts-fp8", "experts-mxfp4")
"""Kernels of Llama, and those of one row through experts, are counted."""
WRAPPED = ("wrapped-vaultgemma", "wrapped-phi")
"""Attention is ours there, in `phi` with a rope of a part of a head."""
FAMILIES = ("mixes", "biases", "gelu", "odd", "mistral", "qwen3", *FUSED, *LATENTS, *WRAPPED)
STATES = ("qwen3_next", "granite4", "granite4_experts")
ENGINES = (
    "plain",
    "pools",
    "drafts",
    "suffix",
    "beams",
    "adapters",
    "qwen3_5",
    "granite4",
    "rounded",
    "adapters-fp8",
)
"""Whole engines on the executor of a GPU: hidden states, tokens, drafts, states."""
HEADS = ("steps", "handoff", "mtp", "ranks")
STAGES = ("llama", "gemma3", "qwen2")
GROUPS = ("qwen2_moe", "gemma4_experts", "glm4_moe")
"""A gate on the shared expert, experts beside a feed-forward, groups of experts."""
SLOW = pytest.mark.matrix


def equal(cases: tuple[str, ...]) -> str:
    return "\n".join(f"{case} equal" for case in cases)


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("interpreted_kernels", ("one",), "all equal"),
        pytest.param("interpreted_kernels", ("all",), "all equal", marks=SLOW),
        ("interpreted_adapters", (), "all equal"),
        ("interpreted_latents", ("one",), "all equal"),
        pytest.param("interpreted_latents", ("all",), "all equal", marks=SLOW),
        ("interpreted_states", (FOLDER, "qwen3_5"), "all equal"),
        pytest.param("interpreted_states", (FOLDER, *STATES), "all equal", marks=SLOW),
        ("interpreted_forward", (FOLDER, *QUICK), equal(QUICK)),
        pytest.param("interpreted_forward", (FOLDER, *FAMILIES), equal(FAMILIES), marks=SLOW),
        ("interpreted_ranks", (), "equal"),
        pytest.param("interpreted_ranks", ("all",), "equal", marks=SLOW),
        ("interpreted_groups", (), "equal"),
        pytest.param("interpreted_groups", ("all",), "equal", marks=SLOW),
        pytest.param("interpreted_groups", (FOLDER, *GROUPS), equal(GROUPS), marks=SLOW),
        ("interpreted_experts", (), None),
        pytest.param("interpreted_experts", ("all",), None, marks=SLOW),
        ("interpreted_quest", (), "all equal"),
        ("speculation_checks", (), None),
        pytest.param("interpreted_executor", (FOLDER, *ENGINES), equal(ENGINES), marks=SLOW),
        pytest.param("interpreted_stages", (FOLDER, *STAGES), equal(STAGES), marks=SLOW),
        pytest.param("interpreted_heads", (FOLDER, *HEADS), equal(HEADS), marks=SLOW),
        pytest.param(
            "fp8_checks", (), "\n".join(check.__name__ for check in fp8_checks.CHECKS), marks=SLOW
        ),
    ],
)
def test_the_interpreter_gives_what_is_written_out(script, arguments, told, tmp_path):
    if script.endswith("_checks") and torch.cuda.is_available():
        pytest.skip("a GPU runs them itself")
    places = os.pathsep.join(map(str, (*HERE.parents[:2], HERE, QUEST)))
    given = [str(tmp_path) if word is FOLDER else word for word in arguments]
    done = subprocess.run(
        [sys.executable, HERE / f"{script}.py", *given],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert told is None or done.stdout.strip() == told
