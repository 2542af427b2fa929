"""States between real processes: hand-offs, next turns, structured output, and kills of either side
around the push of a state. Greedy answers are what one whole forward of transformers says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, running
from fetching_policy import FETCHING
from references import NOISE, references
from streams import at_once, prompt_of
from tiny_families import HYBRIDS
from tiny_models import reference_model, write_tiny_model

TOKENS, LENGTHS = 24, (17, 64, 130, 200)
SCHEMA = {
    "type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), **HYBRIDS["qwen3_5"])


@pytest.fixture(scope="module")
def cluster(model, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    options: dict[str, Any] = {"failpoints": "live", "local_prefill": "never"}
    with running(model, logs, prefill=2, decode=2, **options) as cluster:
        yield cluster


def ask(client, prompt: list[int], **options: Any) -> list[int]:
    result = client.generate(token_ids=prompt, temperature=0.0, ignore_eos=True, **options)
    return list(result.token_ids)


def ask_all(client, seed: int) -> list[list[int]]:
    """Answers to some prompts, asked at once."""
    one = lambda length: ask(client, prompt_of(length + seed), max_tokens=TOKENS)  # noqa: E731
    return at_once(one, LENGTHS)


def check_greedy(model: Path, prompt: list[int], answer: list[int]) -> None:
    """Each token of an answer is the best one after those before it, in one forward of all."""
    import torch

    ids = torch.tensor([prompt + answer])
    with torch.inference_mode():
        logits = reference_model(model, dtype=torch.float32)(ids, use_cache=False).logits[0]
    best = logits[len(prompt) - 1 : -1].topk(2)
    near = best.values[:, 0] - best.values[:, 1] < NOISE
    assert (near | (best.indices[:, 0] == torch.tensor(answer))).all()


def wanted(model: Path, seed: int) -> list[list[int]]:
    answer = references(model, whole=True)
    return [answer(prompt_of(length + seed), TOKENS, past_end=True).tokens for length in LENGTHS]


@pytest.mark.slow
def test_a_hand_off_moves_the_state_and_the_next_turn_goes_on(cluster, model) -> None:
    with cluster.client() as client:
        assert ask_all(client, 0) == wanted(model, 0)
        turn = prompt_of(200) + wanted(model, 0)[-1] + prompt_of(30)
        assert (
            ask(client, turn, max_tokens=TOKENS)
            == references(model, whole=True)(turn, TOKENS, past_end=True).tokens
        )
        form = client.generate(token_ids=prompt_of(70), max_tokens=60, json_schema=SCHEMA)
        assert json.loads(form.text)["n"] in (1, 2, 3)
    moved = "baton_kv_group_pages"
    assert cluster.metric(moved, "decode-0", group="state", state="free") > 0
    cluster.check_baseline()


@pytest.mark.slow
def test_a_turn_goes_on_with_the_state_that_another_worker_has(model, tmp_path) -> None:
    """Turns of a conversation alternate between prefill workers, which fetch from decode workers
    that hold KV and states, also of their answers."""
    own = {"router": {FETCHING: "decode-0"}}
    with running(model, tmp_path, prefill=2, decode=1, local_prefill="never", own=own) as cluster:
        for fetcher in ("prefill-0", "prefill-1"):
            cluster.wait_measured(fetcher, "decode-0")
        prompt = prompt_of(230)
        with cluster.client() as client:
            for turn in range(4):
                answer = ask(client, prompt, max_tokens=40)
                check_greedy(model, prompt, answer)
                prompt = [*prompt, *answer, *prompt_of(20, seed=turn)]
        fetched = "baton_kv_fetches_total"
        found = sum(
            cluster.metric(fetched, worker, outcome="fetched")
            for worker in ("prefill-0", "prefill-1")
        )
        assert found > 0
        cluster.check_baseline()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "moment"),
    [
        ("prefill-0", "prefill.chunk=kill@2"),
        ("prefill-0", "transfer.pushed=kill@2"),
        ("prefill-1", "transfer.before_last_push=kill@2"),
        ("prefill-1", "transfer.last_pushed=kill@2"),
        ("decode-0", "transfer.chunk_landed=kill@2"),
        ("decode-1", "decode.delivered=kill@2"),
        ("decode-0", "decode.tokens=kill@60"),
    ],
)
def test_streams_go_on_equally_after_a_kill(cluster: Cluster, model, worker, moment) -> None:
    with cluster.client(retries=True) as client:

        def ask(turn: int) -> None:
            assert ask_all(client, turn % 2) == wanted(model, turn % 2)

        cluster.strike(worker, moment, ask)
    cluster.check_baseline()
