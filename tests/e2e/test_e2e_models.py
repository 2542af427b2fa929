"""Two models behind one router, through both doors: each answers as it does alone."""

from __future__ import annotations

import time

import openai
import pytest
from cluster import add_model, make_cluster
from test_e2e_tokens import generate_reference
from tiny_models import write_tiny_model

from baton.errors import InvalidRequestError, NotFoundError, UnavailableError

PROMPT = list(range(10, 50))
MAX_TOKENS = 16
HIGH_ID = 450
"""Only the second model's vocabulary reaches that far."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [
        write_tiny_model(folder / "one"),
        write_tiny_model(folder / "two", vocab=500, layers=1, seed=1, max_positions=512),
    ]


@pytest.fixture(scope="module")
def cluster(paths, tmp_path_factory):
    """The first on a pair of workers, the second on one that does both."""
    cluster = make_cluster(paths[0], tmp_path_factory.mktemp("logs"))
    add_model(cluster, paths[1], prefill=0, decode=0, both=1)
    try:
        cluster.start_all()
        yield cluster
    finally:
        codes = cluster.stop()
    assert set(codes.values()) <= {0, -9}, cluster.tail()


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def client(cluster):
    with cluster.client() as client:
        yield client


@pytest.fixture
def http(cluster):
    url = f"http://{cluster.plan.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_both_are_listed(client, http):
    served = {model.name: model for model in client.models()}
    assert sorted(served) == ["one", "two"] == [model.id for model in http.models.list().data]
    assert (served["one"].max_context_tokens, served["two"].max_context_tokens) == (2048, 512)
    assert served["one"].revision != served["two"].revision


def test_each_answers_as_it_does_alone(cluster, client, http, paths):
    options = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
    outputs = {}
    for path in paths:
        name = path.name
        want = generate_reference(path)(PROMPT, MAX_TOKENS)
        got = client.generate(token_ids=PROMPT, model=name, **options)
        assert (list(got.token_ids), got.model) == (want, name)
        over_http = http.completions.create(model=name, prompt=PROMPT, **options)
        assert (over_http.choices[0].text, over_http.model) == (got.text, name)
        outputs[name] = want
    assert outputs["one"] != outputs["two"]
    cluster.check_baseline()


def test_limits_are_those_of_the_model_asked(client):
    with pytest.raises(InvalidRequestError) as refused:
        client.generate(token_ids=[HIGH_ID], model="one", max_tokens=1)
    assert refused.value.violations[0].field == "input.token_ids.ids[0]"
    assert client.generate(token_ids=[HIGH_ID], model="two", max_tokens=1).token_ids
    with pytest.raises(InvalidRequestError) as refused:
        client.generate(token_ids=PROMPT, model="two", max_tokens=1000)
    assert refused.value.reason == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize("name", ["", "three"])
def test_a_name_that_selects_none_is_told_which_there_are(client, http, name):
    with pytest.raises(NotFoundError) as refused:
        client.generate(token_ids=PROMPT, model=name)
    assert refused.value.metadata == {"model": name, "served": "one, two"}
    with pytest.raises(openai.NotFoundError, match="one, two") as refused:
        http.completions.create(model=name, prompt=PROMPT)
    assert refused.value.code == "model_not_found"


def test_one_that_dies_leaves_the_other_serving(cluster, client, http):
    """Last in this file. Its clients are told to wait, and served again when it is back."""
    cluster.kill("two-both-0")
    assert client.generate(token_ids=PROMPT, model="one", max_tokens=4).model == "one"
    wait_until(lambda: [model.name for model in client.models()] == ["one"])
    with pytest.raises(UnavailableError) as refused:
        client.generate(token_ids=PROMPT, model="two", max_tokens=4)
    assert (refused.value.reason, refused.value.metadata["model"]) == ("NO_WORKERS", "two")
    assert http.completions.create(model="one", prompt=PROMPT, max_tokens=4).model == "one"
    assert client.generate(token_ids=PROMPT, max_tokens=4).model == "one", "the only one left"
    cluster.start("two-both-0")
    cluster.wait_ready()
    with cluster.client(retries=True) as patient:
        assert patient.generate(token_ids=PROMPT, model="two", max_tokens=4).model == "two"
    cluster.check_baseline()
