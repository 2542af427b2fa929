"""Turns of conversations with a model with windows: each worker gets a whole resume point, over
NIXL, from the one that computed the turn before, as far as the router's index says that it can."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, make_cluster
from fetching_policy import FETCHING
from references import references
from streams import prompt_of
from tiny_families import EVERY
from tiny_models import write_tiny_model

from telemetry.names import Metric

WORKERS = ("both-0", "both-1")
MAX_TOKENS = 20
TOLD_S = 0.3
"""By then the router has heard which pages the turn before has left."""
GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), **EVERY["gemma3"])


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = make_cluster(
        model,
        tmp_path_factory.mktemp("logs"),
        prefill=0,
        decode=0,
        both=2,
        failpoints="live",
        poison_freed_pages=True,
    )
    cluster.own = {**cluster.own, "router": {FETCHING: ",".join(WORKERS)}}
    with cluster.started():
        cluster.wait_measured(*WORKERS)
        yield cluster


def fetched(cluster: Cluster) -> int:
    return sum(
        int(cluster.metric(Metric.FETCHES + "_total", worker, outcome="fetched"))
        for worker in WORKERS
    )


def talk(cluster: Cluster, model: Path, seed: int, turns: int, **options: bool) -> int:
    """A conversation, whose answers must be the model's. Returns the turns whose prompt came."""
    prompt, came = prompt_of(100, seed=seed), 0
    with cluster.client(**options) as client:
        for turn in range(turns):
            time.sleep(TOLD_S)
            answer = client.generate(token_ids=prompt, **GREEDY)
            want = references(model)(prompt, MAX_TOKENS, past_end=True).tokens
            assert list(answer.token_ids) == want
            loaded = answer.usage.loaded_prompt_tokens.get("peer", 0)
            assert loaded <= answer.usage.cached_prompt_tokens
            came += loaded > 0
            prompt = [*prompt, *answer.token_ids, *prompt_of(20, seed=100 * seed + turn)]
    return came


def test_turns_go_on_behind_what_came_from_the_other_worker(cluster: Cluster, model: Path) -> None:
    came = sum(talk(cluster, model, seed, 4) for seed in range(2))
    assert came >= 4
    assert fetched(cluster) >= came
    cluster.check_baseline()


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    ["fetch.held=kill@1", "transfer.pushed=kill@1", "fetch.asked=kill@1", "fetch.landed=kill@1"],
)
def test_a_worker_that_is_killed_in_a_fetch_costs_no_answer(
    cluster: Cluster, model: Path, moment: str
) -> None:
    """The holder with its pages held, or half sent; the fetcher before and behind its wait."""
    for worker in WORKERS:
        cluster.arm(worker, moment)
    talk(cluster, model, seed=10 + len(moment), turns=3, retries=True)
    gone = [worker for worker in WORKERS if cluster.processes[worker].poll() is not None]
    assert gone, "none was killed"
    for worker in gone:
        cluster.start(worker)
    cluster.wait_ready()
    for worker in WORKERS:
        cluster.arm(worker, "")
        cluster.wait_attached(worker)
    cluster.wait_measured(*WORKERS)
    cluster.check_baseline()
