"""Attention over latents on a GPU: the values that the benchmark compares, and whole engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_kit import build, check_baseline, finish, submit
from test_model_logits import Runner, load
from tiny_families import LATENTS
from tiny_models import write_tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [16, 20])
def test_kernels_give_what_float64_gives(heads):
    from bench.latents import check

    with torch.inference_mode():
        check(heads)


@pytest.mark.parametrize("family", LATENTS)
def test_an_engine_answers_as_on_a_cpu(family, tmp_path):
    """Greedy, in bfloat16: its answer is never far from the best of float32."""
    path = write_tiny_model(tmp_path, tokenizer=False, **LATENTS[family])
    engine = build(path, dtype="bfloat16", device="cuda", max_step_tokens=64)
    prompts = [np.random.default_rng(n).integers(1, 384, n).tolist() for n in (5, 40, 150)]
    runs = [submit(engine, prompt, 12, ignore_eos=True) for prompt in prompts]
    finish(*runs)
    for prompt, run in zip(prompts, runs, strict=True):
        tokens = prompt + run.tokens[0]
        logits = Runner(load(path)).step([(0, tokens[:-1])])[0][len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(run.tokens[0])[:, None])[:, 0]
        assert (logits.max(1).values - chosen).max() < 0.5
    check_baseline(engine)
    engine.stop()
