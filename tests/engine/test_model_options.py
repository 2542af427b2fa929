"""Options that combine: families with the rope and windows of others, half precision, greedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_model_logits import LLAMA3, YARN, Runner, load, reference
from tiny_models import write_tiny_model

from engine.model import load_model

QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
CASES: dict[str, dict[str, Any]] = {
    "mistral_head_dim": {"family": "mistral", "sliding_window": 9, "head_dim": 32},
    "mistral_window_1": {"family": "mistral", "sliding_window": 1},
    "qwen2_yarn_tied": {"family": "qwen2", "rope_parameters": YARN, "tie_word_embeddings": True},
    "qwen2_yarn_factor": {
        "family": "qwen2",
        "rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0},
    },
    "qwen3_llama3": {"family": "qwen3", "rope_parameters": LLAMA3},
    "qwen3_biases_window": {"family": "qwen3", "attention_bias": True, "layers": 3, **QWEN_WINDOW},
    "qwen3_listed_windows": {
        "family": "qwen3",
        "layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **QWEN_WINDOW,
    },
}


def prompt(seed: int, length: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(1, 384, length).tolist()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **CASES[case])
    ids = prompt(2)
    want = reference(path, ids)
    loaded = load(path)
    torch.testing.assert_close(Runner(loaded).step([(0, ids)])[0], want, atol=1e-4, rtol=1e-4)
    runner = Runner(loaded, page_size=16, seed=3)
    parts = [runner.step([(0, ids[a:b])])[0] for a, b in ((0, 1), (1, 30), (30, 47))]
    parts += [runner.step([(0, [token])])[0] for token in ids[47:]]
    torch.testing.assert_close(torch.cat(parts), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["mistral_head_dim", "qwen2_yarn_tied", "qwen3_biases_window"])
def test_half_precision_is_as_near_as_transformers(case, dtype, tmp_path):
    """Mean distance from float32 logits, prompt in chunks and token by token."""
    path = write_tiny_model(tmp_path, tokenizer=False, **CASES[case])
    ids = prompt(5, 40)
    exact = reference(path, ids)
    runner = Runner(load_model(str(path), dtype=dtype, device=torch.device("cpu")))
    parts = [runner.step([(0, ids[:17])])[0], runner.step([(0, ids[17:30])])[0]]
    parts += [runner.step([(0, [token])])[0] for token in ids[30:]]
    logits = torch.cat(parts)
    assert logits.dtype == torch.float32
    theirs = (reference(path, ids, dtype) - exact).abs().mean()
    assert (logits - exact).abs().mean() <= 1.5 * theirs


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_is_token_exact_in_a_batch(family, tmp_path):
    """Four prompts at once against `generate` one by one, down to the first close call."""
    from transformers import AutoModelForCausalLM

    path = write_tiny_model(tmp_path, family=family, tokenizer=False)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = [prompt(seed, length) for seed, length in enumerate((1, 8, 9, 31))]
    runner = Runner(load(path), num_pages=128)
    # One prompt a step: the runner takes rows of one token for decode rows.
    latest = {i: runner.step([(i, ids)])[0][-1] for i, ids in enumerate(prompts)}
    ours: dict[int, list[int]] = {i: [] for i in latest}
    margins: dict[int, list[float]] = {i: [] for i in latest}
    for _ in range(24):
        for i, logits in latest.items():
            best = logits.topk(2)
            ours[i].append(int(best.indices[0]))
            margins[i].append(float(best.values[0] - best.values[1]))
        rows = runner.step([(i, [tokens[-1]]) for i, tokens in ours.items()])
        latest = {i: logits[-1] for i, logits in enumerate(rows)}
    compared = 0
    for i, ids in enumerate(prompts):
        want = theirs.generate(
            torch.tensor([ids]), max_new_tokens=24, min_new_tokens=24, do_sample=False,
            suppress_tokens=None, eos_token_id=[], pad_token_id=0,
        )[0, len(ids) :].tolist()  # fmt: skip
        certain = next((n for n, margin in enumerate(margins[i]) if margin < 1e-3), 24)
        assert ours[i][:certain] == want[:certain]
        compared += certain
    assert compared >= 48
