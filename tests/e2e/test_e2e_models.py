"""Two models behind one router, through both doors: each answers as it does alone. A third set of
weights bears the name of the first, and has no part in what that does."""

from __future__ import annotations

import openai
import pytest
from cluster import add_model, make_cluster
from references import generate_reference
from streams import bring_back, prompt_of, read
from tiny_models import write_tiny_model
from waiting import wait_until

from baton.errors import UnavailableError

PROMPT = list(range(10, 50))
MAX_TOKENS = 16
STRANGER = "one-decode-0"
"""A decode worker of the first model's name, with other weights."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [
        write_tiny_model(folder / "one"),
        write_tiny_model(folder / "two", vocab=500, layers=1, seed=1, max_positions=512),
    ]


@pytest.fixture(scope="module")
def cluster(paths, tmp_path_factory):
    """The first on a pair of workers, the second on one that does both; and the stranger."""
    settings = {"local_prefill": "never", "resume_grace_s": 60}
    cluster = make_cluster(paths[0], tmp_path_factory.mktemp("logs"), **settings)
    add_model(cluster, paths[1], prefill=0, decode=0, both=1)
    other_weights = write_tiny_model(tmp_path_factory.mktemp("other") / "one", seed=2)
    add_model(cluster, other_weights, prefill=0, decode=1)
    with cluster.started(ends_well=True, killed=True):
        yield cluster


@pytest.fixture
def client(cluster):
    with cluster.client() as client:
        yield client


@pytest.fixture
def http(cluster):
    url = f"http://{cluster.plan.http_address}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_each_answers_as_it_does_alone(cluster, client, http, paths):
    options = {"max_tokens": MAX_TOKENS, "temperature": 0.0}
    outputs = {}
    for path in paths:
        name = path.name
        want = generate_reference(path)(tuple(PROMPT), MAX_TOKENS)
        got = client.generate(token_ids=PROMPT, model=name, **options)
        assert (list(got.token_ids), got.model) == (want, name)
        over_http = http.completions.create(model=name, prompt=PROMPT, **options)
        assert (over_http.choices[0].text, over_http.model) == (got.text, name)
        outputs[name] = want
    assert outputs["one"] != outputs["two"]
    cluster.check_baseline()


def test_other_weights_under_one_name_get_neither_a_page_nor_a_stream(cluster, client):
    """Not even where nobody else is left: a stream waits for its own weights to come back, and a
    new request is told why it cannot be run."""
    options = {"model": "one", "temperature": 0.9, "seed": 3}
    want = read(client, prompt_of(40), **options)
    want.end()
    reading = read(client, prompt_of(40), **options)
    reading.until(30)
    cluster.kill("decode-0")
    wait_until(lambda: not cluster.metric("baton_worker_up", worker="decode-0"))
    with pytest.raises(UnavailableError, match="differ in weights") as refused:
        client.generate(token_ids=PROMPT, model="one", max_tokens=4)
    assert (refused.value.reason, refused.value.metadata["model"]) == ("NO_WORKERS", "one")
    bring_back(cluster, "decode-0")
    reading.end()
    assert reading.error is None, reading.error
    assert reading.tokens() == want.tokens()
    check_is_untouched(cluster)


def check_is_untouched(cluster) -> None:
    """Nothing was granted by the stranger nor sent to it; no path to it was ever opened."""
    assert cluster.metric("baton_kv_transfers_total", STRANGER) == 0
    for name in (STRANGER, "prefill-0"):
        opened = (cluster.logs / f"{name}.log").read_text().count("peer open")
        assert (opened > 0) == (name != STRANGER)
    assert not cluster.metric("baton_kv_peer_healthy", "prefill-0", peer=STRANGER)
    cluster.check_baseline()
