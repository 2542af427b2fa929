"""Families between real processes over NIXL: prompts on one worker, answers on another."""

from __future__ import annotations

import pytest
from cluster import make_cluster
from references import references
from streams import prompt_of
from tiny_families import EVERY
from tiny_models import write_tiny_model

QUICK = "gemma3"
"""Which `make test` runs: windows and ropes by layer, norms of all kinds but one."""
MAX_TOKENS = 16
LENGTHS = (1, 16, 17, 100, 300)


@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=() if each == QUICK else pytest.mark.matrix) for each in EVERY],
)
def test_disaggregated(family, tmp_path):
    path = write_tiny_model(tmp_path / "model", **EVERY[family])
    answers = references(path)
    cluster = make_cluster(path, tmp_path / "logs", local_prefill="never")
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
