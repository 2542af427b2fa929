"""Placement by what workers hold, over two routers that know nothing of each other."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import Cluster, make_cluster
from references import references
from streams import prompt_of
from test_e2e_routers import connect
from tiny_models import write_tiny_model
from waiting import wait_until

from baton.client.clients import Client
from telemetry.names import Metric

PAGE = 16
MAX_TOKENS = 20
GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
ROUTED, AGAIN = Metric.ROUTED_CACHED_TOKENS + "_total", Metric.COMPUTED_AGAIN + "_total"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_positions=4096)


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = make_cluster(
        tiny,
        tmp_path_factory.mktemp("logs"),
        prefill=2,
        decode=2,
        routers=2,
        poison_freed_pages=True,
    )
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def clients(cluster: Cluster) -> Iterator[dict[str, Client]]:
    with ExitStack() as stack:
        yield connect(cluster, stack)


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

    wait_until(equal, tell=lambda: f"{known(cluster, one)} {known(cluster, other)}")


def test_any_router_finds_the_conversation_that_another_one_had(
    cluster: Cluster, clients: dict[str, Client], tiny: Path
) -> None:
    prompt = prompt_of(300, seed=1)
    for turn in range(4):
        router = cluster.routers[turn % 2]
        before = cluster.metric(ROUTED, router, kind="foretold")
        answer = clients[router].generate(token_ids=prompt, **GREEDY)
        want = references(tiny)(prompt, MAX_TOKENS, past_end=True).tokens
        assert list(answer.token_ids) == want
        foretold = cluster.metric(ROUTED, router, kind="foretold") - before
        if turn:
            held = len(prompt) - 20 - 1  # all but the new message and the last token
            assert answer.usage.cached_prompt_tokens == held // PAGE * PAGE == foretold
        told(cluster)
        prompt = [*prompt, *answer.token_ids, *prompt_of(20, seed=100 + turn)]
    reasons = {name: cluster.metric(AGAIN, name) for name in cluster.routers}
    assert not any(reasons.values())
    cluster.check_baseline()


def test_an_index_that_is_wrong_costs_time_alone(
    cluster: Cluster, clients: dict[str, Client], tiny: Path
) -> None:
    """The worker that holds the conversation stands still, and then dies with it."""
    prompt = prompt_of(400, seed=2)
    router = cluster.routers[0]
    before = known(cluster, router)
    answer = clients[router].generate(token_ids=prompt, **GREEDY)
    told(cluster)
    grown = {name: pages - before[name] for name, pages in known(cluster, router).items()}
    holder = max((name for name in grown if name.startswith("decode")), key=grown.__getitem__)
    assert grown[holder] >= 400 // PAGE
    cluster.kill(holder, signal.SIGKILL)
    turn = [*prompt, *answer.token_ids, *prompt_of(20, seed=3)]
    for name in cluster.routers:
        again = clients[name].generate(token_ids=turn, **GREEDY)
        want = references(tiny)(turn, MAX_TOKENS, past_end=True).tokens
        assert list(again.token_ids) == want
    wait_until(lambda: known(cluster, router)[holder] == 0)
