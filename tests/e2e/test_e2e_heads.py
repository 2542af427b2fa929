"""Draft heads between real processes: what a head keeps is handed off, and a worker without it, or
with another one, costs speed alone. Streams stay the same through kills of either side."""

from __future__ import annotations

import threading

import pytest
from cluster import make_cluster
from heads_kit import write_head
from streams import prompt_of
from tiny_models import write_tiny_model

from console.doctor.cluster import check_cluster

TOKENS = 24
LENGTHS = (17, 64, 100)
DRAWN = {"temperature": 1.0, "seed": 5, "top_k": 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), layers=5)


@pytest.fixture(scope="module")
def heads(model, tmp_path_factory):
    return [write_head(tmp_path_factory.mktemp(f"head{seed}"), model, seed=seed) for seed in (0, 1)]


def running(model, logs, heads, **options):
    own = options.pop("own", {})
    return make_cluster(
        model,
        logs,
        failpoints="live",
        local_prefill="never",
        prefix_cache=False,
        speculation=str(heads[0]),
        draft_tokens=3,
        own=own,
        **options,
    )


def requests(client, **options) -> list[list[int]]:
    """Answers to some prompts, asked at once."""
    found: dict[int, list[int]] = {}

    def ask(length: int) -> None:
        result = client.generate(
            token_ids=prompt_of(length), max_tokens=TOKENS, ignore_eos=True, **options
        )
        found[length] = list(result.token_ids)

    threads = [threading.Thread(target=ask, args=(length,)) for length in LENGTHS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[length] for length in sorted(found)]


def degraded(cluster, cause: str) -> float:
    return cluster.metric("baton_speculation_degraded_total", "decode-0", cause=cause)


def test_what_a_head_keeps_is_handed_off_or_missed(model, heads, tmp_path) -> None:
    """Of three prefill workers one has the head, one another and one none."""
    own = {"prefill-1": {"speculation": str(heads[1])}, "prefill-2": {"speculation": "off"}}
    cluster = running(model, tmp_path, heads, prefill=3, own=own)
    try:
        cluster.start_all()
        with cluster.client() as client:
            wanted = requests(client, temperature=0.0, speculation=False)
            for _ in range(3):
                assert requests(client, temperature=0.0) == wanted
        drafted = "baton_speculation_drafted_tokens_total"
        assert cluster.metric(drafted, "decode-0", position="0") > 0
        counts = {cause: degraded(cluster, cause) for cause in ("peer_without", "peer_differs")}
        sent = [
            cluster.metric("baton_kv_transfers_total", f"prefill-{i}", outcome="sent")
            for i in range(3)
        ]
        assert counts == {"peer_without": sent[2], "peer_differs": sent[1]}
        assert min(sent) > 0
        found = check_cluster(cluster.plan.admin_address, expected=True).findings
        told = " ".join(f"{one.subject} {one.found}" for one in found)
        assert f"decode-0 {sent[1]:.0f} prompts came without its draft head's KV: peer_d" in told
        cluster.check_baseline()
    finally:
        cluster.stop()


@pytest.mark.slow
def test_streams_go_on_equally_after_kills(model, heads, tmp_path) -> None:
    cluster = running(model, tmp_path, heads, prefill=2, decode=2)
    try:
        cluster.start_all()
        with cluster.client(retries=True) as client:
            drawn = requests(client, **DRAWN, speculation=False)
            for worker, moment in (
                ("prefill-0", "prefill.chunk=kill@1"),
                ("decode-0", "decode.tokens=kill@9"),
                ("decode-1", "decode.after_grant=kill@2"),
            ):
                cluster.arm(worker, moment)
                for _ in range(6):
                    assert requests(client, **DRAWN) == drawn
                    if cluster.processes[worker].poll() is not None:
                        break
                assert cluster.wait_gone(worker) < 0, "it was not killed"
                cluster.start(worker)
                cluster.wait_ready()
                cluster.wait_attached(worker)
        cluster.check_baseline()
    finally:
        cluster.stop()


@pytest.mark.slow
def test_ranks_hand_off_what_a_head_keeps(model, heads, tmp_path) -> None:
    """Two ranks to one, and one to two: each has its part."""
    for ranks in ({"prefill-0": {"tp": 2}}, {"decode-0": {"tp": 2}}):
        cluster = running(model, tmp_path / next(iter(ranks)), heads, own=ranks)
        try:
            cluster.start_all()
            with cluster.client() as client:
                wanted = requests(client, temperature=0.0, speculation=False)
                assert requests(client, temperature=0.0) == wanted
            assert degraded(cluster, "peer_without") + degraded(cluster, "peer_differs") == 0
            cluster.check_baseline()
        finally:
            cluster.stop()
