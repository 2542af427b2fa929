"""Through real processes: clients that are not ours, OpenAI's over HTTP and one in Node over gRPC;
and what our own says, beside a model without servers."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest
from cluster import running
from node_kit import run_scenario
from tiny_models import write_tiny_model

from baton import LLM

TEXT = "Prefill runs the first leg, decode runs the second."
CHAT = [{"role": "user", "content": "Zwölf Boxkämpfer jagen Viktor 🥖"}]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("openai") / "model")


@pytest.fixture(scope="module")
def cluster(tiny):
    with running(tiny, tiny.parent / "logs", ends_well=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def offline(tiny):
    with LLM(tiny, device="cpu", debug={"num_pages": 100}) as llm:
        yield llm


@pytest.fixture
def client(cluster):
    url = f"http://{cluster.plan.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def model(client):
    return client.models.list().data[0].id


def test_both_apis_say_the_same(cluster, client, model):
    with cluster.client() as grpc:
        text = grpc.generate(TEXT, max_tokens=MAX_TOKENS, temperature=0.0)
        turn = grpc.generate(messages=CHAT, max_tokens=MAX_TOKENS, temperature=0.0)
    options = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0}
    whole = client.completions.create(prompt=TEXT, **options)
    assert whole.choices[0].text == text.text
    assert whole.usage.prompt_tokens == text.usage.prompt_tokens
    assert whole.usage.completion_tokens == text.usage.output_tokens
    chat = client.chat.completions.create(messages=CHAT, **options)
    assert chat.choices[0].message.content == turn.text
    stream = client.chat.completions.create(messages=CHAT, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == turn.text
    cluster.check_baseline()


SAME = [
    {"prompt": TEXT, "temperature": 0.0, "logprobs": True, "top_logprobs": 2},
    {"messages": CHAT, "seed": 3, "choices": 2, "prompt_logprobs": True},
    {"prompt": TEXT, "seed": 4, "top_k": 20, "min_p": 0.01, "stop": ["e", "\0"], "min_tokens": 3},
    {"token_ids": range(10, 60), "temperature": 0.0, "ignore_eos": True, "omit_text": True},
    {
        "messages": CHAT,
        "temperature": 0.7,
        "seed": 5,
        "repetition_penalty": 1.2,
        "logit_bias": {9: 4},
    },
]


@pytest.mark.parametrize("request_", SAME, ids=lambda asked: "-".join(list(asked)[:2]))
def test_a_model_in_this_process_says_what_servers_say(cluster, offline, request_):
    with cluster.client() as grpc:
        served = grpc.generate(max_tokens=MAX_TOKENS, **request_)
    here = offline.generate(max_tokens=MAX_TOKENS, **request_)
    assert here.usage == replace(served.usage, cached_prompt_tokens=here.usage.cached_prompt_tokens)
    assert (here.model, here.model_revision) == (served.model, served.model_revision)
    for ours, theirs in zip(here.choices, served.choices, strict=True):
        assert replace(ours, logprobs=()) == replace(theirs, logprobs=())
        check_alike(ours.logprobs, theirs.logprobs)
    check_alike(here.prompt_logprobs, served.prompt_logprobs)
    cluster.check_baseline()


def check_alike(ours, theirs) -> None:
    """The same tokens; recomputed log probabilities differ by rounding."""
    for one, other in zip(ours, theirs, strict=True):
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.clients
def test_node_streams(cluster):
    seen = run_scenario("whole", cluster.plan.router_address)
    with cluster.client() as grpc:
        ours = grpc.generate(TEXT, max_tokens=MAX_TOKENS, temperature=0.0)
        served = grpc.models()
        token_ids = grpc.tokenize(TEXT)
    streamed = seen["streamed"]
    assert streamed["error"] is None
    assert streamed["tokenIds"] == list(ours.token_ids)
    assert "".join(streamed["texts"]) == seen["unary"] == ours.text
    assert streamed["started"]["model"] == served[0].name == seen["models"][0]["name"]
    assert streamed["started"]["promptTokens"] == len(token_ids) == len(seen["tokenIds"])
    assert streamed["finished"]["finishReason"] == f"FINISH_REASON_{ours.finish_reason.name}"
    assert streamed["finished"]["usage"]["outputTokens"] == ours.usage.output_tokens
    assert len(streamed["texts"]) > 1
    cluster.check_baseline()


@pytest.mark.clients
@pytest.mark.parametrize(
    ("scenario", "code"), [("cancel", "CANCELLED"), ("deadline", "DEADLINE_EXCEEDED")]
)
def test_node_leaves_and_its_pages_are_free(cluster, scenario, code):
    seen = run_scenario(scenario, cluster.plan.router_address)
    assert seen["error"]["code"] == code
    assert seen["finished"] is None
    cluster.check_baseline()


@pytest.mark.clients
def test_node_reads_every_violation(cluster):
    error = run_scenario("wrong", cluster.plan.router_address)["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert error["ErrorInfo"]["reason"] == "INVALID_FIELD"
    assert {found["field"] for found in error["BadRequest"]["fieldViolations"]} == {
        "input.sampling.temperature",
        "input.sampling.top_p",
        "input.choices",
    }
