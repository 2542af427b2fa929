"""Decoders through transformers' own code on a GPU: graphs with its kernels and ours, against the
reference on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_kit import build
from test_cuda_families import LENGTHS, NEW, log_probabilities
from test_model_logits import Runner, load
from tiny_models import write_tiny_model
from tiny_wrapped import WRAPPED

pytestmark = pytest.mark.gpu
WRAP = {"model_impl": "transformers"}
CASES = ("llama", "qwen3_moe", "vaultgemma", "starcoder2", "gpt2", "gpt_oss")


@pytest.mark.parametrize("name", CASES)
def test_as_near_to_float32_as_without_kernels(name, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **WRAPPED[name])
    draw = np.random.default_rng(0)
    prompts = [draw.integers(1, 384, length).tolist() for length in LENGTHS]
    executor, ours = log_probabilities(path, prompts, NEW, **WRAP)
    assert executor == "CudaExecutor"
    whole = [tokens for tokens, _ in ours]
    _, theirs = log_probabilities(path, whole, 1, attention="sdpa", **WRAP)
    exact = Runner(load(path, **WRAP))
    errors, bounds = [], []
    for row, ((tokens, mine), (_, other)) in enumerate(zip(ours, theirs, strict=True)):
        logits = exact.step([(row, tokens)])[0].log_softmax(-1)[:-1]
        wanted = logits.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
        errors.append((mine - wanted).abs())
        bounds.append((other[: len(wanted)] - wanted).abs())
    error, bound = torch.cat(errors).mean(), torch.cat(bounds).mean()
    assert error <= 1.6 * bound + 2e-3, (float(error), float(bound))


@pytest.mark.parametrize("name", CASES)
def test_its_steps_are_graphs(name, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **WRAPPED[name])
    engine = build(path, device="cuda", **WRAP)
    try:
        assert engine._loop._executor._graphs, "its code can be captured"
    finally:
        engine.stop()
