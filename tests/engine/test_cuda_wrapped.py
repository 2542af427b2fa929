"""Decoders through transformers' own code on a GPU: graphs with its kernels and ours, against the
reference on the CPU."""

from __future__ import annotations

import pytest
from engine_kit import build
from test_cuda_families import check_near
from tiny_models import write_tiny_model
from tiny_wrapped import WRAPPED

pytestmark = pytest.mark.gpu
WRAP = {"model_impl": "transformers"}
CASES = ("llama", "qwen3_moe", "vaultgemma", "starcoder2", "gpt2", "gpt_oss")


@pytest.mark.parametrize("name", CASES)
def test_as_near_to_float32_as_without_kernels(name, tmp_path):
    check_near(write_tiny_model(tmp_path, tokenizer=False, **WRAPPED[name]), **WRAP)


@pytest.mark.parametrize("name", CASES)
def test_its_steps_are_graphs(name, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **WRAPPED[name])
    engine = build(path, device="cuda", **WRAP)
    try:
        assert engine._loop._executor._graphs, "its code can be captured"
    finally:
        engine.stop()
