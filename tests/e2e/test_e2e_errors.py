"""Rows of the error table that only a real model on a real worker can bring about."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from cluster import Cluster, make_cluster
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_model

from baton.errors import BatonError

PAGES = 40
"""One of them is for scribbling on."""
POOL_TOKENS = (PAGES - 1) * 16


def spoil(model: Path) -> Path:
    """One weight that is no number, where every token meets it."""
    path = model / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    return model


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    model = spoil(write_tiny_model(folder / "model"))
    cluster = make_cluster(
        model, folder / "logs", prefill=0, decode=0, both=1, num_pages=PAGES, max_step_tokens=64
    )
    try:
        cluster.start_all()
        yield cluster
    finally:
        codes = cluster.stop()
    assert set(codes.values()) == {0}, cluster.tail()


def refused(cluster: Cluster, prompt_tokens: int, max_tokens: int) -> BatonError:
    with cluster.client() as client, pytest.raises(BatonError) as caught:
        client.generate(token_ids=[7] * prompt_tokens, max_tokens=max_tokens, timeout_s=30)
    return caught.value


@pytest.mark.parametrize("choices", [1, 3])
def test_a_model_that_computes_nan(cluster, choices):
    with cluster.client() as client, pytest.raises(BatonError) as caught:
        client.generate("The quick brown fox", choices=choices, max_tokens=9, timeout_s=30)
    assert caught.value.code is grpc.StatusCode.INTERNAL
    assert (caught.value.reason, caught.value.retry_after_s) == ("NUMERICAL_ERROR", None)
    assert len(caught.value.trace_id) == 32
    cluster.check_baseline()


def test_nan_over_http(cluster):
    url = f"http://{cluster.plan.http_address}/v1/completions"
    body = json.dumps({"prompt": "The quick", "max_tokens": 3, "model": "model"}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == 500
    error = json.loads(caught.value.read())["error"]
    assert (error["code"], error["type"]) == ("numerical_error", "server_error")


def test_what_no_pool_can_hold(cluster):
    """To the token: what just fits runs, as far as this model lets it."""
    too_long = refused(cluster, POOL_TOKENS - 9, 10)
    assert too_long.code is grpc.StatusCode.INVALID_ARGUMENT
    assert too_long.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert too_long.metadata["max_context_tokens"] == str(POOL_TOKENS)
    assert refused(cluster, POOL_TOKENS - 10, 10).reason == "NUMERICAL_ERROR"
    cluster.check_baseline()
