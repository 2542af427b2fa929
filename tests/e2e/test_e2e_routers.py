"""Two routers behind one address share their workers, and know nothing of each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import Cluster, running
from references import references
from streams import prompt_of, read
from waiting import wait_until

from baton.client.clients import Client
from baton.errors import BatonError
from console.tracing.traces import fetch, missing_spans
from telemetry.names import Metric

OPTIONS = {"temperature": 0.0, "ignore_eos": True}
MOST_CONNECTIONS = 64
"""Of so many, a kernel that spreads them gives some to either router."""
ASKED = "baton_requests_total"
ROUTED, AGAIN = Metric.ROUTED_CACHED_TOKENS + "_total", Metric.COMPUTED_AGAIN + "_total"


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(
        tiny,
        tmp_path_factory.mktemp("logs"),
        routers=2,
        trace=True,
        failpoints="live",
        poison_freed_pages=True,
        max_sequences=8,
    ) as cluster:
        yield cluster


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


def known(cluster: Cluster, router: str) -> dict[str, float]:
    """Pages in pools that a router knows of, by worker."""
    return {
        worker: cluster.metric(Metric.KNOWN_PAGES, router, worker=worker, tier="pool")
        for worker in cluster.workers
    }


def told(cluster: Cluster) -> None:
    """Both routers know the same pages of every worker, and nothing is on its way."""
    one, other = cluster.routers

    def equal() -> bool:
        behind = [cluster.metric(Metric.PAGE_EVENTS_BEHIND, name) for name in cluster.routers]
        return not any(behind) and known(cluster, one) == known(cluster, other)

    wait_until(equal, show=lambda: f"{known(cluster, one)} {known(cluster, other)}")


def test_any_router_finds_the_conversation_that_another_one_had(cluster, stack, tiny):
    """Placement goes by what workers hold, and the routers know nothing of each other."""
    prompt, clients = prompt_of(300, seed=1), connect(cluster, stack)
    for turn in range(4):
        router = cluster.routers[turn % 2]
        before = cluster.metric(ROUTED, router, kind="foretold")
        answer = clients[router].generate(token_ids=prompt, max_tokens=20, **OPTIONS)
        assert list(answer.token_ids) == references(tiny)(prompt, 20, past_end=True).tokens
        foretold = cluster.metric(ROUTED, router, kind="foretold") - before
        if turn:
            held = len(prompt) - 20 - 1  # all but the new message and the last token
            assert answer.usage.cached_prompt_tokens == held // 16 * 16 == foretold
        told(cluster)
        prompt = [*prompt, *answer.token_ids, *prompt_of(20, seed=100 + turn)]
    assert not any(cluster.metric(AGAIN, name) for name in cluster.routers)
    cluster.check_baseline()


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
