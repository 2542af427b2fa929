"""Options that combine: families with the rope and windows of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_model_logits import LLAMA3, Runner, load, reference
from tiny_families import YARN
from tiny_models import write_tiny_model

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


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **CASES[case])
    ids = np.random.default_rng(2).integers(1, 384, 60).tolist()
    want = reference(path, ids)
    loaded = load(path)
    torch.testing.assert_close(Runner(loaded).step([(0, ids)])[0], want, atol=1e-4, rtol=1e-4)
    runner = Runner(loaded, page_size=16, seed=3)
    parts = [runner.step([(0, ids[a:b])])[0] for a, b in ((0, 1), (1, 30), (30, 47))]
    parts += [runner.step([(0, [token])])[0] for token in ids[47:]]
    torch.testing.assert_close(torch.cat(parts), want, atol=1e-4, rtol=1e-4)


def test_parameters_and_modules_of_a_ready_model_are_found_at_once(tmp_path):
    """As plain attributes. What is set later takes their place, as the head is on a CPU."""
    model = load(write_tiny_model(tmp_path, tokenizer=False)).model
    model.finish()
    assert model.head is model._parameters["head"]
    for module in model.layers.modules():
        for name, own in (*module._parameters.items(), *module._modules.items()):
            assert vars(module)[name] is own
    later = torch.nn.Parameter(torch.ones(4))
    model.norm.weight = later
    assert model.norm.weight is later
    assert model.norm._parameters["weight"] is later
