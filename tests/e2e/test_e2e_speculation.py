"""Drafts between real processes: streams through a hand-off, and through kills of either side,
equal those of workers without drafts."""

from __future__ import annotations

import threading

import pytest
from cluster import make_cluster
from references import references
from streams import prompt_of
from tiny_models import write_tiny_model

TOKENS = 60
DRAWN = {"temperature": 1.0, "seed": 5, "top_k": 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    cluster = make_cluster(
        model,
        tmp_path_factory.mktemp("logs"),
        prefill=2,
        decode=2,
        failpoints="live",
        local_prefill="never",
        prefix_cache=False,
        speculation="suffix",
    )
    try:
        cluster.start_all()
        yield cluster
    finally:
        cluster.stop()


def repeated(length: int) -> list[int]:
    """A prompt with much to be found again."""
    return (prompt_of(12) * (length // 12 + 1))[:length]


def requests(client, **options) -> list[list[int]]:
    """Answers to some prompts, asked at once."""
    found: dict[int, list[int]] = {}

    def ask(length: int) -> None:
        result = client.generate(
            token_ids=repeated(length), max_tokens=TOKENS, ignore_eos=True, **options
        )
        found[length] = list(result.token_ids)

    threads = [threading.Thread(target=ask, args=(length,)) for length in (17, 40, 64, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[length] for length in sorted(found)]


def test_a_hand_off_with_drafts_gives_what_transformers_gives(cluster, model) -> None:
    answer = references(model)
    wanted = [answer(repeated(n), TOKENS, past_end=True).tokens for n in (17, 40, 64, 100)]
    with cluster.client() as client:
        assert requests(client, temperature=0.0) == wanted
        told = client.generate(
            token_ids=repeated(100), max_tokens=TOKENS, ignore_eos=True, temperature=0.0
        ).usage
        silent = client.generate(
            token_ids=repeated(100),
            max_tokens=TOKENS,
            ignore_eos=True,
            temperature=0.0,
            speculation=False,
        )
    assert list(silent.token_ids) == wanted[-1]
    assert (silent.usage.accepted_draft_tokens, silent.usage.rejected_draft_tokens) == (0, 0)
    assert told.accepted_draft_tokens + told.rejected_draft_tokens > 0
    drafted = "baton_speculation_drafted_tokens_total"
    assert sum(cluster.metric(drafted, f"decode-{i}", position="0") for i in range(2)) > 0
    cluster.check_baseline()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "moment"),
    [
        ("prefill-0", "prefill.chunk=kill@1"),
        ("decode-0", "decode.tokens=kill@9"),
        ("decode-0", "decode.tokens=kill@60"),
        ("decode-1", "decode.after_grant=kill@2"),
    ],
)
def test_streams_go_on_equally_after_a_kill(cluster, worker: str, moment: str) -> None:
    with cluster.client(retries=True) as client:
        wanted = requests(client, **DRAWN, speculation=False)
        cluster.arm(worker, moment)
        for _ in range(6):
            assert requests(client, **DRAWN) == wanted
            if cluster.processes[worker].poll() is not None:
                break
        assert cluster.wait_gone(worker) < 0, "it was not killed"
    cluster.start(worker)
    cluster.wait_ready()
    cluster.wait_attached(worker)
    cluster.check_baseline()
