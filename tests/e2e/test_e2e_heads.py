"""Draft heads between real processes: what a head keeps is handed off, and a worker without it, or
with another one, costs speed alone. Streams stay the same through kills of either side."""

from __future__ import annotations

import pytest
from cluster import running
from fetching_policy import FETCHING
from heads_kit import write_head
from streams import at_once, prompt_of
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


def with_heads(model, logs, heads, **options):
    drafts = {"speculation": str(heads[0]), "draft_tokens": 3, "prefix_cache": False}
    usual = {**drafts, "failpoints": "live", "local_prefill": "never"}
    return running(model, logs, **{**usual, **options})


def requests(client, **options) -> list[list[int]]:
    """Answers to some prompts, asked at once."""
    options |= {"max_tokens": TOKENS, "ignore_eos": True}
    ask = lambda length: list(client.generate(token_ids=prompt_of(length), **options).token_ids)  # noqa: E731
    return at_once(ask, LENGTHS)


def check(found, wanted) -> None:
    assert found == wanted


def degraded(cluster, cause: str) -> float:
    return cluster.metric("baton_speculation_degraded_total", "decode-0", cause=cause)


def test_what_a_head_keeps_is_handed_off_or_missed(model, heads, tmp_path) -> None:
    """Of three prefill workers one has the head, one another and one none."""
    own = {"prefill-1": {"speculation": str(heads[1])}, "prefill-2": {"speculation": "off"}}
    with with_heads(model, tmp_path, heads, prefill=3, own=own) as cluster:
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


@pytest.mark.slow
def test_streams_go_on_equally_after_kills(model, heads, tmp_path) -> None:
    with with_heads(model, tmp_path, heads, prefill=2, decode=2) as cluster:
        with cluster.client(retries=True) as client:
            drawn = requests(client, **DRAWN, speculation=False)
            for worker, moment in (
                ("prefill-0", "prefill.chunk=kill@1"),
                ("decode-0", "decode.tokens=kill@9"),
                ("decode-1", "decode.after_grant=kill@2"),
            ):
                cluster.strike(worker, moment, lambda _: check(requests(client, **DRAWN), drawn))
        cluster.check_baseline()


@pytest.mark.slow
def test_ranks_hand_off_what_a_head_keeps(model, heads, tmp_path) -> None:
    """Two ranks to one, and one to two: each has its part."""
    for ranks in ({"prefill-0": {"tp": 2}}, {"decode-0": {"tp": 2}}):
        with with_heads(model, tmp_path / next(iter(ranks)), heads, own=ranks) as cluster:
            with cluster.client() as client:
                wanted = requests(client, temperature=0.0, speculation=False)
                assert requests(client, temperature=0.0) == wanted
            assert degraded(cluster, "peer_without") + degraded(cluster, "peer_differs") == 0
            cluster.check_baseline()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["auto", "fp8"])
def test_fetched_pages_do_without_what_a_head_keeps(model, heads, tmp_path, precision) -> None:
    """Turns of conversations, whose pages prefill workers get from the decode worker, but not what
    a head keeps, which the decode worker has. FP8 pages have the same rules."""
    options = {"prefill": 2, "prefix_cache": True, "kv_cache_dtype": precision}
    fetching = {"router": {FETCHING: "decode-0"}}
    with with_heads(model, tmp_path, heads, **options, own=fetching) as cluster:
        for worker in ("prefill-0", "prefill-1"):
            cluster.wait_measured(worker, "decode-0")
        loaded = 0

        def talk(client, seed, drafts) -> list[list[int]]:
            nonlocal loaded
            prompt, answers = prompt_of(100, seed=seed), []
            for turn in range(3):
                answer = client.generate(
                    token_ids=prompt, speculation=drafts, max_tokens=TOKENS,
                    temperature=0.0, ignore_eos=True,
                )  # fmt: skip
                answers.append(list(answer.token_ids))
                loaded += answer.usage.loaded_prompt_tokens.get("peer", 0)
                prompt = [*prompt, *answers[-1], *prompt_of(20, seed=100 * seed + turn)]
            return answers

        with cluster.client() as client:
            drafted, plain = (
                [talk(client, seed, drafts) for seed in range(3)] for drafts in (True, False)
            )
            for seed in range(3, 30):  # A fetch that takes half a second is late: a machine may
                if not loaded:  # be too busy for some time.
                    talk(client, seed, True)
        assert drafted == plain
        assert loaded > 0
        drafted = "baton_speculation_drafted_tokens_total"
        assert cluster.metric(drafted, "decode-0", position="0") > 0
        assert degraded(cluster, "peer_without") + degraded(cluster, "peer_differs") == 0
        cluster.check_baseline()
