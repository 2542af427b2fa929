"""Families between real processes over NIXL: prompts on one worker, answers on another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster import make_cluster
from quantised_experts import write_mxfp4
from references import References, references
from streams import prompt_of
from tiny_families import EVERY, EXPERTS, HYBRIDS
from tiny_models import write_tiny_model, write_tokenizer

FAMILIES: Mapping[str, dict[str, Any]] = {
    "mistral": {"family": "mistral", "sliding_window": 24},
    "qwen2": {
        "family": "qwen2", "use_sliding_window": True, "sliding_window": 16,
        "max_window_layers": 1, "layers": 3,
    },
    "qwen3": {"family": "qwen3", "head_dim": 32},
    **EVERY,
    **HYBRIDS,
}  # fmt: skip
"""All but Llama, which the other tests between processes have."""
QUICK = "gemma3"
"""Which `make test` runs: windows and ropes by layer. On one engine it has every family."""
MAX_TOKENS = 16
LENGTHS = (1, 16, 17, 100, 300)


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each == QUICK else pytest.mark.matrix) for each in FAMILIES],
)
def test_disaggregated(family, tmp_path):
    path = write_tiny_model(tmp_path / "model", **FAMILIES[family])
    check(path, references(path, whole=family in HYBRIDS), tmp_path / "logs")


@pytest.mark.matrix
def test_gpt_oss_in_mxfp4_as_it_is_published(tmp_path):
    source = write_tiny_model(tmp_path / "source", **EXPERTS["gpt_oss"])
    published, same = tmp_path / "mxfp4", tmp_path / "floats"
    write_mxfp4(source, published, same)
    write_tokenizer(published)
    check(published, references(same), tmp_path / "logs")


def check(path: Path, answers: References, logs: Path) -> None:
    cluster = make_cluster(path, logs, local_prefill="never")
    try:
        cluster.start_all()
        with cluster.client() as client:
            for length in LENGTHS:
                prompt = prompt_of(length)
                result = client.generate(token_ids=prompt, max_tokens=MAX_TOKENS, temperature=0.0)
                assert list(result.token_ids) == answers(prompt, MAX_TOKENS).tokens
        assert cluster.metric("baton_kv_transfers_total", "decode-0") >= len(LENGTHS)
        cluster.check_baseline()
    finally:
        codes = cluster.stop()
    assert set(codes.values()) == {0}, cluster.tail()
