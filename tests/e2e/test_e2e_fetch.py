"""Turns of conversations, computed with pages that other workers hold, over NIXL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from beams_kit import Searches
from cluster import Cluster, make_cluster
from fetching_policy import FETCHING
from references import references
from streams import prompt_of
from waiting import wait_until

from baton.client.generation import Generation
from console.tracing.traces import fetch as fetch_trace
from engine.beams.params import BeamParams
from telemetry.names import Attr, Metric, SpanName

TURNS = 4
MAX_TOKENS = 40
GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
FETCHES = Metric.FETCHES + "_total"
PAGES = Metric.FETCH_PAGES + "_total"


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = make_cluster(
        tiny,
        tmp_path_factory.mktemp("logs"),
        prefill=2,
        decode=2,
        trace=True,
        local_prefill="never",
        poison_freed_pages=True,
        own={"decode-1": {"num_pages": 60, "kv_host_gib": 0.02}},
    )
    cluster.own = {**cluster.own, "router": {FETCHING: "decode-0,decode-1"}}
    with cluster.started(ends_well=True):
        for fetcher in ("prefill-0", "prefill-1"):
            for holder in ("decode-0", "decode-1"):
                cluster.wait_measured(fetcher, holder)
        yield cluster


def outcomes(cluster: Cluster) -> Counter[str]:
    found: Counter[str] = Counter()
    for worker in cluster.workers:
        for outcome in ("fetched", "short", "missing", "late"):
            found[outcome] += int(cluster.metric(FETCHES, worker, outcome=outcome))
    return found


def test_turns_of_conversations_come_from_the_workers_that_hold_them(
    cluster: Cluster, tiny: Path
) -> None:
    """Every answer is the model's, and what was fetched is told in usage, metrics and traces."""
    told: list[Generation] = []
    with cluster.client() as client:
        for seed in range(3):
            prompt = prompt_of(100, seed=seed)
            for turn in range(TURNS):
                answer = client.generate(token_ids=prompt, **GREEDY)
                want = references(tiny)(prompt, MAX_TOKENS, past_end=True).tokens
                assert list(answer.token_ids) == want
                told.append(answer)
                prompt = [*prompt, *answer.token_ids, *prompt_of(20, seed=100 * seed + turn)]
    from_peers = [one for one in told if one.usage.loaded_prompt_tokens.get("peer")]
    assert from_peers, outcomes(cluster)
    found = outcomes(cluster)
    assert found["fetched"] + found["short"] >= len(from_peers)
    assert found["missing"] >= 3  # The first turns: nobody holds anything.
    got = sum(cluster.metric(PAGES, worker, direction="got") for worker in cluster.workers)
    given = sum(cluster.metric(PAGES, worker, direction="given") for worker in cluster.workers)
    assert got == given > 0
    admin = cluster.admin_addresses["router"]
    trace = fetch_trace(admin, from_peers[0].trace_id)
    (span,) = [span for span in trace.spans if span.name == SpanName.KV_FETCH]
    assert span.attributes[Attr.KV_PAGES] > 0
    assert str(span.attributes[Attr.FETCH_HOLDER]).startswith("decode-")
    (given_span,) = [span for span in trace.spans if span.name == SpanName.KV_GIVE]
    assert given_span.process.startswith("decode-")
    assert given_span.parent_id == span.parent_id
    assert given_span.attributes[Attr.KV_BYTES] == span.attributes[Attr.KV_BYTES]
    assert span.start_ns < given_span.start_ns < given_span.end_ns
    cluster.check_baseline()


def test_a_search_goes_on_behind_what_was_fetched(cluster: Cluster, tiny: Path) -> None:
    searches, loaded = Searches(tiny), 0
    with cluster.client() as client:
        for seed in range(70, 74):
            prompt = prompt_of(100, seed=seed)
            answer = client.generate(token_ids=prompt, **GREEDY)
            prompt = [*prompt, *answer.token_ids, *prompt_of(20, seed=100 * seed)]
            found = client.generate(token_ids=prompt, max_tokens=12, beams=4, choices=4)
            want = searches.find(prompt, BeamParams(4), 12, (0,))
            assert [list(one.token_ids) for one in found.choices] == [ids for ids, _ in want]
            loaded += found.usage.loaded_prompt_tokens.get("peer", 0)
    assert loaded > 0, outcomes(cluster)
    cluster.check_baseline()


def test_edited_turns_and_stripped_thoughts_get_right_answers(cluster: Cluster, tiny: Path) -> None:
    prompt = prompt_of(160, seed=50)
    variants = [
        prompt,
        [*prompt[:70], (prompt[70] + 1) % 300 + 5, *prompt[71:]],
        [*prompt[:40], *prompt[90:]],
        [*prompt[16:]],
    ]
    with cluster.client() as client:
        for variant in variants * 2:
            answer = client.generate(token_ids=variant, **GREEDY)
            want = references(tiny)(variant, MAX_TOKENS, past_end=True).tokens
            assert list(answer.token_ids) == want
    cluster.check_baseline()
    damaged = "baton_kv_damaged_pages_total"
    wait_until(lambda: not any(cluster.metric(damaged, worker) for worker in cluster.workers))
