"""The kernels of every family that has fused ones, on a GPU, against the reference: PyTorch's own
operations on the same GPU, and float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import build, check_baseline, finish, submit
from test_model_logits import Runner, load
from tiny_families import FUSED, LATENTS
from tiny_models import write_tiny_model

from engine.types import SamplingParams

pytestmark = pytest.mark.gpu

WIDE = {
    "gemma4-512": FUSED["gemma4"] | {"head_dim": 256, "global_head_dim": 512},
    "gemma2-256": FUSED["gemma2"] | {"head_dim": 256},
    "cohere2-128": FUSED["cohere2"] | {"hidden": 512, "heads": 4, "kv_heads": 2},
    "lfm2-64": FUSED["lfm2"] | {"hidden": 512, "heads": 8, "kv_heads": 4},
}
"""As large as checkpoints have heads."""
FAMILIES = {**FUSED, **LATENTS, **WIDE}
LENGTHS = (1, 17, 70, 200)
NEW = 24
SAMPLING = SamplingParams(temperature=0.0, top_logprobs=0)


def log_probabilities(
    path: Path, prompts: list[list[int]], tokens: int, **options: object
) -> tuple[str, list[tuple[list[int], torch.Tensor]]]:
    """The executor's name; tokens with the new ones, and log probabilities of all but the first."""
    defaults = {"device": "cuda", "max_step_tokens": 128, "max_sequences": 8, "num_pages": 300}
    engine = build(path, prefix_cache=False, **{**defaults, **options})
    common = {"sampling": SAMPLING, "ignore_eos": True, "prompt_logprobs": True}
    runs = [submit(engine, prompt, tokens, **common) for prompt in prompts]
    finish(*runs)
    check_baseline(engine)
    name = type(engine._loop._executor).__name__
    engine.stop()
    found = []
    for prompt, run in zip(prompts, runs, strict=True):
        records = [*(run.scored.records if run.scored else ()), *run.records[0]]
        numbers = [record.logprob for record in records if record.logprob is not None]
        found.append(([*prompt, *run.tokens[0]], torch.tensor(numbers, dtype=torch.float32)))
    return name, found


def check_near(path: Path, **options: object) -> None:
    """Kernels are as near to float32 on the CPU as PyTorch's own operations in 16 bits."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(1, 384, length).tolist() for length in LENGTHS]
    name, ours = log_probabilities(path, prompts, NEW, **options)
    assert name == "CudaExecutor", "it has fused kernels"
    whole = [tokens for tokens, _ in ours]
    _, theirs = log_probabilities(path, whole, 1, attention="sdpa", **options)
    exact = Runner(load(path, **options))
    errors, bounds = [], []
    for row, ((tokens, mine), (_, other)) in enumerate(zip(ours, theirs, strict=True)):
        logits = exact.step([(row, tokens)])[0].log_softmax(-1)[:-1]
        wanted = logits.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
        errors.append((mine - wanted).abs())
        bounds.append((other[: len(wanted)] - wanted).abs())
    error, bound = torch.cat(errors).mean(), torch.cat(bounds).mean()
    assert error <= 1.6 * bound + 2e-3, (float(error), float(bound))


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_are_as_near_to_float32_as_pytorch_in_16_bits(family, tmp_path):
    check_near(write_tiny_model(tmp_path, tokenizer=False, **FAMILIES[family]))
