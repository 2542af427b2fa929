"""Decode workers prefill by themselves: same tokens, pages back, whole traces. What they take over
is the engine's rule: `engine/test_takeover.py`. When they help a busy prefill worker is the
router's: `router/test_dispatch_local.py`.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
from cluster import READY_S, Cluster, make_cluster
from references import references
from scraping import SETTLED_S, Figures, scrape, scrape_until
from streams import prompt_of

from baton.client.generation import Generation
from console.tracing.traces import fetch, missing_spans
from telemetry.names import Attr, Metric

MAX_TOKENS = 12
STEP_TOKENS = 64
GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
LOCAL = Metric.LOCAL_PREFILLS + "_total"
COMPUTED = {"name": Metric.PREFILL_TOKENS + "_total", "source": "computed"}


@pytest.fixture(scope="module")
def reference(tiny):
    """Greedy continuation by transformers, past end of sequence."""

    def generate(prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
        return references(tiny)(prompt, max_tokens, past_end=True).tokens

    return generate


@contextmanager
def running(tiny, folder, **options):
    settings = {"max_step_tokens": STEP_TOKENS, "trace": True, **options}
    cluster = make_cluster(tiny, folder / "logs", **settings)
    with cluster.started(ends_well=True, killed=True):
        yield cluster
        cluster.check_baseline()


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory):
    with running(tiny, tmp_path_factory.mktemp("pair"), failpoints="live") as cluster:
        yield cluster


def local_prefills(cluster: Cluster) -> dict[str, float]:
    figures = scrape(cluster, "router").all(LOCAL)
    return {dict(labels)["reason"]: count for labels, count in figures.items()}


def computed(cluster: Cluster, name: str) -> float:
    return scrape(cluster, name).of(COMPUTED["name"], source="computed")


def sent(figures: Figures) -> float:
    return figures.of("baton_kv_transfers_total", outcome="sent")


def check_trace(cluster: Cluster, result: Generation, reason: str) -> None:
    """Every span is there, the prompt's are the decode worker's, and it says why."""
    trace = fetch(cluster.plan.admin_address, result.trace_id, patience_s=SETTLED_S)
    assert missing_spans(trace) == []
    legs = [span for span in trace.spans if span.name == "decode"]
    assert [leg.attributes[Attr.ROUTE_LOCAL_REASON] for leg in legs[-1:]] == [reason]
    below = {span.name: span for span in trace.children(legs[-1])}
    assert below.keys() == {"prefill.queue", "prefill.compute", "decode.generate"}
    assert {span.instance for span in below.values()} == {"decode-0"}


# It holds most of the prompt already.


def test_the_next_turn_of_a_conversation_needs_no_prefill_worker(pair, reference):
    first = prompt_of(300, seed=1)
    with pair.client() as client:
        answer = client.generate(token_ids=first, **GREEDY)
        assert list(answer.token_ids) == reference(first)
        turn = [*first, *answer.token_ids, *prompt_of(20, seed=2)]
        scrape_until(pair, "prefill-0", lambda f: sent(f) == 1)
        before = computed(pair, "decode-0")
        pair.slow_down("prefill-0", step_s=1.0)  # It would take some six steps.
        result = client.generate(token_ids=turn, **GREEDY)
        pair.disarm()
        assert list(result.token_ids) == reference(turn)
    held = (len(first) + MAX_TOKENS - 1) // 16 * 16
    assert result.usage.cached_prompt_tokens == held
    figures = scrape_until(
        pair, "decode-0", lambda f: f.of(COMPUTED["name"], source="computed") > before
    )
    assert figures.of(COMPUTED["name"], source="computed") - before == len(turn) - held
    assert sent(scrape(pair, "prefill-0")) == 1
    assert local_prefills(pair) == {"cached": 1}
    check_trace(pair, result, "cached")


def test_the_prefill_worker_dies_for_good(pair, reference):
    """The last of this cluster's tests: what is under way there goes on at the decode worker, and
    so does all that follows."""
    long, short = prompt_of(5000, seed=9), prompt_of(40, seed=10)
    results: list[Generation] = []
    with pair.client() as client:

        def ask() -> None:
            results.append(client.generate(token_ids=long, **GREEDY))

        before = computed(pair, "prefill-0")
        pair.slow_down("prefill-0", step_s=0.5)  # It would take 40 s: it dies in the middle.
        asking = threading.Thread(target=ask)
        asking.start()
        scrape_until(
            pair, "prefill-0", lambda f: f.of(COMPUTED["name"], source="computed") > before
        )
        pair.kill("prefill-0")
        del pair.baselines["prefill-0"]
        asking.join(READY_S)
        assert list(results[0].token_ids) == reference(long)
        result = client.generate(token_ids=short, **GREEDY)
        assert list(result.token_ids) == reference(short)
    assert local_prefills(pair)["no_prefill_worker"] == 2
    check_trace(pair, result, "no_prefill_worker")
    pair.check_baseline()


# There is no prefill worker at all.
