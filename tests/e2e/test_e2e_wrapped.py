"""Decoders through transformers' own code between real processes over NIXL: prompts on one worker,
answers on another, with a file of ours and without."""

from __future__ import annotations

import pytest
from cluster import running
from references import references
from streams import prompt_of
from tiny_models import write_tiny_model
from tiny_wrapped import WRAPPED

pytestmark = pytest.mark.matrix
MAX_TOKENS = 16
LENGTHS = (1, 16, 17, 100, 300)


@pytest.mark.parametrize("name", ["qwen3_moe", "vaultgemma", "starcoder2"])
def test_disaggregated(name, tmp_path):
    path = write_tiny_model(tmp_path / "model", **WRAPPED[name])
    answers = references(path, whole=True)
    ranks = {"decode-0": {"tp": 2}} if name == "starcoder2" else {}
    with running(
        path,
        tmp_path / "logs",
        own=ranks,
        local_prefill="never",
        model_impl="transformers",
        ends_well=True,
    ) as cluster:
        with cluster.client() as client:
            for length in LENGTHS:
                prompt = prompt_of(length)
                result = client.generate(token_ids=prompt, max_tokens=MAX_TOKENS, temperature=0.0)
                assert list(result.token_ids) == answers(prompt, MAX_TOKENS).tokens
        assert cluster.metric("baton_kv_transfers_total", "decode-0") >= len(LENGTHS)
        cluster.check_baseline()
