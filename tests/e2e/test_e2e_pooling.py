"""Embeddings and scores by every door, of prefill workers without a decode worker: the vectors of
transformers, retries, and nothing left behind."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
import torch
from cluster import Cluster, make_cluster, running
from tiny_models import write_pooling_model, write_scoring_model

from baton.errors import DeadlineError, InvalidRequestError, OverloadedError
from telemetry.names import Metric

NOISE = 1e-4
TEXTS = ["The quick brown fox", "jumps over the lazy dog.", "いろはにほへと", "fox " * 150]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modules = ("Pooling", {"pooling_mode_mean_tokens": True}), ("Normalize", {})
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return write_pooling_model(folder, *modules, family="qwen3", head_dim=32)


@pytest.fixture(scope="module")
def embeds(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill workers of a model that only embeds."""
    folder = tmp_path_factory.mktemp("embeds")
    cluster = make_cluster(model, folder, prefill=2, decode=0, trace=True, failpoints="live")
    with cluster.started(ends_well=True, killed=True):
        yield cluster


def post(cluster: Cluster, path: str, body: Any) -> Any:
    request = urllib.request.Request(
        f"http://{cluster.plan.http_address}{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def wanted(model: Path, ids: list[int]) -> Any:
    from transformers import AutoModel

    reference = AutoModel.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        mean = reference(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()
    return mean / np.linalg.norm(mean)


def test_all_doors_give_the_vectors_of_transformers(embeds: Cluster, model: Path) -> None:
    with embeds.client() as client:
        ids = [list(client.tokenize(text)) for text in TEXTS]
        ours = client.embed(TEXTS)
        assert ours.prompt_tokens == sum(map(len, ids))
        vectors = np.array(ours.vectors)
        for vector, prompt in zip(vectors, ids, strict=True):
            assert np.abs(vector - wanted(model, prompt)).max() < NOISE
        assert np.abs(np.array(client.embed(ids).vectors) - vectors).max() < NOISE
        first = np.array(client.embed(TEXTS[0], pooling="last", normalize=False).vectors[0])
        assert abs(np.linalg.norm(first) - 1) > 0.01
        scores = client.score(TEXTS[0], TEXTS[1:]).scores
        assert np.abs(np.array(scores) - vectors[1:] @ vectors[0]).max() < NOISE
    told = post(embeds, "/v1/embeddings", {"input": TEXTS, "dimensions": 8})
    cut = vectors[:, :8] / np.linalg.norm(vectors[:, :8], axis=1, keepdims=True)
    assert np.abs(np.array([one["embedding"] for one in told["data"]]) - cut).max() < NOISE
    assert told["usage"]["total_tokens"] == ours.prompt_tokens
    packed = post(embeds, "/v1/embeddings", {"input": ids, "encoding_format": "base64"})["data"]
    read = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in packed]
    assert np.abs(np.array(read) - vectors).max() < NOISE
    assert [one["index"] for one in packed] == list(range(len(TEXTS)))
    ranked = post(
        embeds,
        "/v2/rerank",
        {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 2, "return_documents": True},
    )["results"]
    best = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [one["index"] for one in ranked] == best
    assert [one["document"]["text"] for one in ranked] == [TEXTS[1 + index] for index in best]
    told = post(embeds, "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})["data"]
    assert np.abs(np.array([one["score"] for one in told]) - scores).max() < NOISE
    embeds.check_baseline()


@pytest.mark.parametrize("kept", [5, -1, 1 << 31])
def test_a_long_input_is_kept_by_its_end(embeds: Cluster, model: Path, kept: int) -> None:
    text = "The quick brown fox jumps. " * 400
    with embeds.client() as client:
        ids = list(client.tokenize(text))
        most = client.models()[0].max_context_tokens
    assert len(ids) > most
    run = ids[-kept:] if kept == 5 else ids[-most:]
    told = post(embeds, "/v1/embeddings", {"input": [text, ids], "truncate_prompt_tokens": kept})
    assert told["usage"]["prompt_tokens"] == 2 * len(run)
    for one in told["data"]:
        assert np.abs(np.array(one["embedding"]) - wanted(model, run)).max() < NOISE


def test_a_worker_that_dies_is_replaced_by_another(embeds: Cluster, model: Path) -> None:
    embeds.arm("prefill-0", "engine.step=kill@2")
    many = [f"{text} {number}" for number in range(60) for text in TEXTS]
    with embeds.client() as client, ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda texts: client.embed(texts).vectors, [many, many]))
        assert np.abs(np.array(both[0]) - np.array(both[1])).max() < NOISE
        ids = list(client.tokenize(many[-1]))
    assert np.abs(np.array(both[0][-1]) - wanted(model, ids)).max() < NOISE
    embeds.processes["prefill-0"].wait(30)
    embeds.start("prefill-0")
    embeds.wait_ready()
    embeds.check_baseline()


def test_a_deadline_ends_all_inputs_of_a_call(embeds: Cluster) -> None:
    embeds.slow_down(*embeds.workers, step_s=0.3)
    try:
        with embeds.client() as client, pytest.raises((DeadlineError, OverloadedError)):
            client.embed(TEXTS * 100, timeout_s=1.0)
        embeds.check_baseline()
    finally:
        embeds.disarm()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": [""]}, "input[0]: "),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "2048"),
        ("/v1/embeddings", {"input": [[1, 999]]}, "input[0][1]: "),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "bits"}, "encoding_format"),
        ("/v1/embeddings", {"input": ["a", "b " * 3000]}, "input[1]"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1: "),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["a"] * 3}, "queries: "),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]: "),
        ("/v1/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation: "),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query: "),
        ("/v1/score", {"text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/completions", {"prompt": "a"}, "model"),
    ],
)
def test_bad_fields_are_named_and_cost_nothing(
    embeds: Cluster, path: str, body: Any, words: str
) -> None:
    before = [embeds.metric(Metric.PREFILL_TOKENS, name) for name in embeds.workers]
    with pytest.raises(HTTPError) as refused:
        post(embeds, path, body)
    assert refused.value.code == 400
    assert words in refused.value.read().decode()
    assert [embeds.metric(Metric.PREFILL_TOKENS, name) for name in embeds.workers] == before


def test_heads_score_pairs_on_a_worker_of_both_roles(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = write_scoring_model(tmp_path / "tiny", family="qwen3", head_dim=32)
    with running(model, tmp_path / "logs", prefill=0, decode=0, both=1, ends_well=True) as cluster:
        with cluster.client() as client:
            raw = client.score(TEXTS[0], TEXTS[1:3], raw=True)
            found = client.score(TEXTS[0], TEXTS[1:3]).scores
            ids = [[*client.tokenize(TEXTS[0]), *client.tokenize(text)] for text in TEXTS[1:3]]
            with pytest.raises(InvalidRequestError, match="no head that draws"):
                client.generate("a")
        reference = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            logits = [float(reference(torch.tensor([each])).logits[0, 0]) for each in ids]
        assert np.abs(np.array(raw.scores) - logits).max() < NOISE
        assert np.abs(np.array(found) - 1 / (1 + np.exp(-np.array(logits)))).max() < NOISE
        cluster.check_baseline()
