"""The data path between two workers is cut, and both still talk to the router."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import make_cluster
from streams import prompt_of
from tiny_models import write_tiny_model
from waiting import wait_until

PROMPT_TOKENS = 400


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    tiny = write_tiny_model(tmp_path_factory.mktemp("model"), max_positions=4096)
    cluster = make_cluster(
        tiny,
        tmp_path_factory.mktemp("logs"),
        prefill=2,
        failpoints="live",
        poison_freed_pages=True,
    )
    cluster.start_all()
    yield cluster
    cluster.stop()


def generate(cluster, seeds: range) -> list[tuple[int, ...]]:
    """Greedy, all at once."""

    def one(seed: int) -> tuple[int, ...]:
        prompt = prompt_of(PROMPT_TOKENS, seed=seed)
        options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "timeout_s": 60}
        return tuple(client.generate(token_ids=prompt, **options).token_ids)

    with cluster.client() as client, ThreadPoolExecutor(len(seeds)) as pool:
        return list(pool.map(one, seeds))


def cut(cluster, *prefills: str) -> None:
    """Nothing goes between these and the decode worker, either way, from now on."""
    wait_for_paths(cluster)  # Requests are to find them cut, not the self-test.
    points = [f"transfer.path=raise~{name}" for name in prefills]
    cluster.arm("decode-0", ",".join(points))
    for name in prefills:
        cluster.arm(name, "transfer.path=raise~decode-0")


def mend(cluster) -> None:
    for name in cluster.workers:
        cluster.arm(name, "")
    wait_for_paths(cluster)


def wait_for_paths(cluster) -> None:
    """Until every path is open and its self-test is over; a broken one is tried again after 1, 2,
    4, 8 s."""
    paths = [("decode-0", "prefill-0"), ("decode-0", "prefill-1")]
    for source, peer in [*paths, *(path[::-1] for path in paths)]:
        cluster.wait_measured(source, peer)
        wait_until(lambda: cluster.metric("baton_kv_peer_healthy", source, peer=peer))


def quarantined(cluster) -> float:
    return cluster.metric("baton_kv_transfers_quarantined", "decode-0")


def failed_attempts(cluster) -> float:
    return cluster.metric("baton_retries_total") + cluster.metric("baton_failovers_total")


@pytest.mark.parametrize("num_cut", [1, 2])
def test_a_cut_path_is_avoided_and_its_quarantine_ends_over_the_router(cluster, num_cut):
    """With one prefill worker cut off the other takes over; with both, the decode worker itself."""
    seeds = range(10 * num_cut, 10 * num_cut + 4)
    cut(cluster, *["prefill-0", "prefill-1"][:num_cut])
    aborted = cluster.metric("baton_kv_transfers_total", "decode-0", outcome="aborted")
    got = generate(cluster, seeds)
    assert cluster.metric("baton_kv_transfers_total", "decode-0", outcome="aborted") > aborted
    wait_until(lambda: not quarantined(cluster), 15, tell=cluster.tail)
    assert cluster.metric("baton_kv_peer_healthy", "prefill-0", peer="decode-0") == 0, "still cut"
    cluster.check_baseline()
    if num_cut == 1:
        before = failed_attempts(cluster)
        generate(cluster, range(90, 94))
        assert failed_attempts(cluster) == before, "the pair was taken again"
    else:
        assert cluster.metric("baton_local_prefills_total", reason="no_prefill_worker") >= 4
    mend(cluster)
    assert generate(cluster, seeds) == got
    cluster.check_baseline()
    for name in cluster.workers:
        assert cluster.metric("baton_kv_stale_notifications_total", name) == 0
        assert cluster.metric("baton_kv_damaged_pages_total", name) == 0
