"""FP8 KV between real processes over NIXL; a worker with the same weights and other KV has no part.

The model has two layers, so a number at a border between two of e4m3 hardly moves a logit.
"""

from __future__ import annotations

import pytest
from cluster import running
from references import references
from streams import prompt_of
from tiny_models import write_tiny_model
from waiting import wait_until

MARGIN = 0.1
MAX_TOKENS = 16
STRANGER = "decode-1"
LENGTHS = (1, 16, 17, 100, 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    with running(
        model,
        tmp_path_factory.mktemp("logs"),
        decode=2,
        own={STRANGER: {"kv_cache_dtype": "auto"}},
        kv_cache_dtype="fp8",
        local_prefill="never",
        prefix_cache=False,
    ) as cluster:
        yield cluster


def test_a_pair_gives_what_transformers_gives_over_a_cache_that_rounds(cluster, model):
    answer = references(model, fp8_kv=True)
    with cluster.client() as client:
        for length in LENGTHS:
            prompt = prompt_of(length)
            want = answer(prompt, MAX_TOKENS)
            result = client.generate(token_ids=prompt, max_tokens=MAX_TOKENS, temperature=0.0)
            for token, right, margin in zip(
                result.token_ids, want.tokens, want.margins, strict=False
            ):
                assert token == right or margin < MARGIN
                if token != right:
                    break
    assert cluster.metric("baton_kv_transfers_total", "decode-0") >= len(LENGTHS)
    cluster.check_baseline()


def test_workers_of_another_precision_refuse_each_other(cluster):
    wait_until(lambda: cluster.metric("baton_worker_up", worker=STRANGER))
    assert cluster.metric("baton_kv_transfers_total", STRANGER) == 0
    assert "peer open" not in (cluster.logs / f"{STRANGER}.log").read_text()
    assert cluster.metric("baton_kv_peer_healthy", "prefill-0", peer=STRANGER) == 0
