"""Pages that left the pool come back between real processes, and the answer says where from."""

from __future__ import annotations

import pytest
from cluster import running
from openai import OpenAI
from references import references
from streams import prompt_of
from tiny_models import write_tiny_model

MAX_TOKENS = 8
GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
POOL_PAGES = 60
LONG = 400
"""Tokens of a prompt; two of them fill the pool."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def cluster(model, tmp_path_factory, request):
    """Workers of one rank, or of two."""
    ranks = {"tp": request.param}
    with running(
        model,
        tmp_path_factory.mktemp("logs"),
        own={"prefill-0": ranks, "decode-0": ranks},
        num_pages=POOL_PAGES,
        kv_host_gib=0.01,
        local_prefill="never",
    ) as cluster:
        yield cluster
        cluster.check_baseline()


def test_usage_says_how_much_of_a_prompt_was_loaded_and_from_where(cluster, model):
    answer = references(model)
    prompt = prompt_of(LONG, seed=1)
    with cluster.client() as client:
        for seed in (1, 2, 3, 4):
            client.generate(token_ids=prompt_of(LONG, seed=seed), **GREEDY)
        again = client.generate(token_ids=prompt, **GREEDY)
    assert list(again.token_ids) == answer(prompt, MAX_TOKENS, past_end=True).tokens
    loaded = again.usage.loaded_prompt_tokens
    assert set(loaded) == {"host"}
    assert 0 < loaded["host"] <= again.usage.cached_prompt_tokens < LONG


def test_the_openai_door_says_it_too(cluster):
    with OpenAI(base_url=f"http://{cluster.plan.http_address}/v1", api_key="none") as client:
        for seed in (11, 12, 13, 14, 11):
            whole = client.completions.create(
                model="", prompt=prompt_of(LONG, seed=seed), max_tokens=MAX_TOKENS, temperature=0
            )
    details = whole.usage.prompt_tokens_details
    assert 0 < details.loaded_tokens["host"] <= details.cached_tokens < LONG
