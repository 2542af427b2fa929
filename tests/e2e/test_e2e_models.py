"""Two models behind one router, through both doors: each answers as it does alone. A third set of
weights bears the name of the first, and has no part in what that does."""

from __future__ import annotations

import threading

import grpc
import openai
import pytest
from cluster import add_model, make_cluster
from references import generate_reference
from streams import bring_back, prompt_of, read
from tiny_models import write_tiny_model
from waiting import wait_until
from worker_kit import DECODE, PREFILL, Attempted

from baton.errors import InvalidRequestError, NotFoundError, UnavailableError
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from serving.release import stamp

PROMPT = list(range(10, 50))
MAX_TOKENS = 16
HIGH_ID = 450
"""Only the second model's vocabulary reaches that far."""
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
    try:
        cluster.start_all()
        yield cluster
    finally:
        codes = cluster.stop()
    assert set(codes.values()) <= {0, -9}, cluster.tail()


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
        want = generate_reference(path)(tuple(PROMPT), MAX_TOKENS)
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


def test_workers_that_differ_exchange_nothing_though_a_router_introduces_them(cluster):
    """One that errs: they compare for themselves."""
    prefill, decode = identity(cluster, "prefill-0"), identity(cluster, STRANGER)
    assert prefill.model.name == decode.model.name
    assert prefill.model.fingerprint != decode.model.fingerprint
    for name, peer, mode in (("prefill-0", decode, PREFILL), (STRANGER, prefill, DECODE)):
        submit = Attempted(40).message(mode, peer.endpoint.agent_name)
        answers = tell(cluster, name, meet=worker_pb2.Meet(worker=peer), submit=submit)
        failed = next(answer.failed for answer in answers if answer.HasField("failed"))
        assert failed.attempt_id == submit.attempt_id
        assert failed.reason == worker_pb2.FAILURE_REASON_BAD_PEER
    check_is_untouched(cluster)


def check_is_untouched(cluster) -> None:
    """Nothing was granted by the stranger nor sent to it; no path to it was ever opened."""
    assert cluster.metric("baton_kv_transfers_total", STRANGER) == 0
    for name in (STRANGER, "prefill-0"):
        opened = (cluster.logs / f"{name}.log").read_text().count("peer open")
        assert (opened > 0) == (name != STRANGER)
    assert not cluster.metric("baton_kv_peer_healthy", "prefill-0", peer=STRANGER)
    cluster.check_baseline()


def identity(cluster, name: str) -> worker_pb2.WorkerIdentity:
    return next(answer.attached.worker for answer in tell(cluster, name))


def tell(cluster, name: str, **messages):
    """What a worker answers to a router of ours, in order; yields while the stream lives."""
    requests = [worker_pb2.WorkRequest(attach=stamp(worker_pb2.Attach(router_id="test")))]
    requests += [worker_pb2.WorkRequest(**{kind: said}) for kind, said in messages.items()]
    over = threading.Event()

    def say():
        yield from requests
        over.wait(10)

    with grpc.insecure_channel(cluster.workers[name]) as channel:
        try:
            yield from worker_pb2_grpc.WorkerServiceStub(channel).Work(say(), timeout=10)
        finally:
            over.set()


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
