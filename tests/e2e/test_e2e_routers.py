"""Two routers behind one address share their workers, and know nothing of each other."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import openai
import pytest
from cluster import GENERATED_S, Cluster, make_cluster
from streams import Asking, prompt_of, read
from tiny_models import write_tiny_model
from typer.testing import CliRunner
from waiting import wait_until

from baton.client.clients import Client
from baton.errors import BatonError
from console.cli import app
from console.tracing.traces import fetch, missing_spans

OPTIONS = {"temperature": 0.0, "ignore_eos": True}
MOST_CONNECTIONS = 64
"""Of so many, a kernel that spreads them gives some to either router."""
ASKED = "baton_requests_total"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = make_cluster(
        write_tiny_model(tmp_path_factory.mktemp("model"), max_positions=4096),
        tmp_path_factory.mktemp("logs"),
        routers=2,
        trace=True,
        failpoints="live",
        poison_freed_pages=True,
        max_sequences=8,
    )
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(cluster: Cluster, stack: ExitStack) -> dict[str, Client]:
    """A client on each of the routers, by name."""
    found: dict[str, Client] = {}
    for _ in range(MOST_CONNECTIONS):
        before = {name: cluster.metric(ASKED, name) for name in cluster.routers}
        client = stack.enter_context(cluster.client())
        client.generate(token_ids=[5, 6, 7], max_tokens=1, **OPTIONS)
        asked = wait_until(
            lambda: [name for name in before if cluster.metric(ASKED, name) > before[name]]
        )
        found.setdefault(asked[0], client)
        if len(found) == len(before):
            return found
    raise AssertionError(f"all connections went to {found}")


def test_either_router_answers_the_same_and_leaves_a_whole_trace_in_one_place(cluster, stack):
    answers = []
    for router, client in connect(cluster, stack).items():
        answer = client.generate(token_ids=prompt_of(100), max_tokens=20, **OPTIONS)
        answers.append(answer.token_ids)
        trace = fetch(cluster.plan.admin_address, answer.trace_id, patience_s=30)
        assert missing_spans(trace) == []
        assert trace.request.instance == router
        processes = {span.instance for span in trace.spans}
        # Of the second, the decode worker may hold the prompt already.
        assert {router, "decode-0"} <= processes <= {router, "prefill-0", "decode-0"}
    assert answers[0] == answers[1]
    cluster.check_baseline()


def test_top_and_doctor_add_up_what_the_routers_say(cluster, stack):
    connect(cluster, stack)
    admins = ",".join(cluster.admin_addresses[name] for name in cluster.routers)
    shown = CliRunner().invoke(app, ["top", "--once", "--json", "--admin", admins])
    found = json.loads(shown.output)
    assert [worker["state"] for worker in found["workers"]] == ["up", "up"]
    asked = sum(cluster.metric("gen_ai_server_time_to_first_token_seconds_count", name)
                for name in cluster.routers)  # fmt: skip
    assert found["latencies"]["TTFT"]["count"] == asked
    shown = CliRunner().invoke(app, ["doctor", "--no-self-test", "--admin", admins])
    assert "2 workers attached" in shown.output
    assert "warn  decode-0" not in shown.output
    first = cluster.plan.admin_address
    shown = CliRunner().invoke(app, ["doctor", "--no-self-test", "--admin", first])
    assert "routers that it is attached to: 2, that were asked: 1" in shown.output
    shown = CliRunner().invoke(app, ["top", "--once", "--admin", first])
    assert "of 1 of 2 routers" in shown.output


def test_two_routers_share_workers_and_the_death_of_one_is_not_the_others(cluster, stack):
    """Each overcommits what both count on: requests wait, and none meets another's pages."""
    prompts = [prompt_of(300, seed=i) for i in range(10)]
    clients = connect(cluster, stack)
    doomed_router, living_router = cluster.routers  # the first has the traces, too
    one, other = clients[doomed_router], clients[living_router]
    mine = [read(one, prompt, max_tokens=40, **OPTIONS) for prompt in prompts]
    theirs = [read(other, prompt, max_tokens=40, **OPTIONS) for prompt in reversed(prompts)]
    for a in (*mine, *theirs):
        a.end()
        assert a.error is None, a.error
    assert [a.tokens() for a in mine] == [b.tokens() for b in reversed(theirs)]
    cluster.slow_down("decode-0")
    doomed = [read(one, prompt, max_tokens=2000, **OPTIONS) for prompt in prompts[:3]]
    living = [read(other, prompt, max_tokens=60, **OPTIONS) for prompt in prompts[3:6]]
    for reading in (*doomed, *living):
        reading.until(10)
    cluster.kill(doomed_router)
    for reading in doomed:
        reading.end()
        assert isinstance(reading.error, BatonError)
    cluster.disarm()
    for reading, before in zip(living, mine[3:6], strict=True):
        reading.end()
        assert reading.error is None, reading.error
        assert reading.tokens()[:40] == before.tokens()
    for _ in range(8):  # of two that listened, each would have got some of these
        client = stack.enter_context(cluster.client())
        again = client.generate(token_ids=prompts[0], max_tokens=40, **OPTIONS)
        assert list(again.token_ids) == mine[0].tokens()
    cluster.check_baseline()
    cluster.start(doomed_router)
    cluster.wait_ready()
    again = connect(cluster, stack)[doomed_router].generate(
        token_ids=prompts[0], max_tokens=40, **OPTIONS
    )
    assert list(again.token_ids) == mine[0].tokens()
    for name in cluster.workers:
        assert cluster.metric("baton_kv_damaged_pages_total", name) == 0
    cluster.check_baseline()


def test_while_one_drains_every_request_is_answered(cluster, stack):
    """Those of gRPC channels that follow the service config, and of OpenAI's client."""
    over = threading.Event()
    answered: list[int] = []
    expected = stack.enter_context(cluster.client()).generate(
        token_ids=prompt_of(30), max_tokens=8, **OPTIONS
    )

    def ask_grpc() -> None:
        with cluster.client(retries=True) as client:
            while not over.is_set():
                answer = client.generate(token_ids=prompt_of(30), max_tokens=8, **OPTIONS)
                assert answer.token_ids == expected.token_ids
                answered.append(1)

    def ask_http() -> None:
        url = f"http://{cluster.plan.http_address}/v1"
        with openai.OpenAI(base_url=url, api_key="-", timeout=GENERATED_S) as client:
            while not over.is_set():
                answer = client.completions.create(
                    model="", prompt=prompt_of(30), max_tokens=8, temperature=0,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                assert answer.choices[0].text == expected.text
                answered.append(1)

    threads = [Asking(ask) for ask in (ask_grpc,) * 2 + (ask_http,) * 2]
    for thread in threads:
        thread.start()
    drained = cluster.routers[1]
    for _ in range(2):
        enough = len(answered) + 12
        wait_until(lambda: len(answered) >= enough, tell=cluster.tail)
        cluster.processes[drained].send_signal(signal.SIGTERM)
        assert cluster.wait_gone(drained) == 0
        cluster.start(drained)
        cluster.wait_ready()
    over.set()
    for thread in threads:
        thread.end()
    cluster.check_baseline()
