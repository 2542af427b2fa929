"""Greedy output through real processes equals transformers, token for token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, running
from references import generate_reference
from streams import prompt_of
from tiny_models import write_tiny_model

from baton.client.clients import Client
from baton.client.generation import FinishReason
from engine.model.families import read_config

TEXTS = [
    "Prefill runs the first leg, decode runs the second.",
    "Zwölf Boxkämpfer jagen Viktor",
    "いろはにほへと 🏃‍♀️",
    "Once upon a time " * 20,
]
CHATS = ["What is the capital of France?", "Name three colours.", "Grüße auf Deutsch, bitte! 🥖"]
LENGTHS = (1, 15, 16, 17, 300)
CROWDS = 10
"""One after the other, until each worker has had a part: a slow client may not make a crowd."""


def prompts(path: Path) -> list[list[int]]:
    """Twelve: lengths at page boundaries, several chunks, chats, text that is not ASCII."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    vocab = len(tokenizer)
    rng = np.random.default_rng(12)
    found = [rng.integers(5, vocab, length).tolist() for length in LENGTHS]
    found += [tokenizer(text)["input_ids"] for text in TEXTS]
    for chat in CHATS:
        turns = [{"role": "user", "content": chat}]
        found.append(
            tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        )
    return found


def check(cluster: Cluster, path: Path, max_tokens: int, every: int = 1) -> None:
    """Every so many of the prompts one by one, and then all at once."""
    reference = generate_reference(path)
    many = prompts(path)[::every]
    ends = read_config(path).eos_token_ids
    with cluster.client() as client:
        solo = []
        for prompt in many:
            result = client.generate(token_ids=prompt, max_tokens=max_tokens, temperature=0.0)
            want = reference(tuple(prompt), max_tokens)
            assert list(result.token_ids) == want
            ended = want[-1] in ends
            reason = FinishReason.END_OF_SEQUENCE if ended else FinishReason.LENGTH
            assert result.finish_reason is reason
            assert result.usage.prompt_tokens == len(prompt)
            assert result.usage.output_tokens == len(want)
            solo.append(want)
        crowd = [many[i % len(many)] for i in range(16 // every)]
        with ThreadPoolExecutor(16) as pool:
            results = list(pool.map(lambda p: _stream(client, p, max_tokens), crowd))
        assert results == [solo[i % len(many)] for i in range(16 // every)]
    cluster.check_baseline()


def _stream(client: Client, prompt: list[int], max_tokens: int) -> list[int]:
    with client.stream(token_ids=prompt, max_tokens=max_tokens, temperature=0.0) as stream:
        return [token for delta in stream for token in delta.token_ids]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "options",
    [
        {"prefill": 1, "decode": 1},
        {"prefill": 1, "decode": 1, "transport": "nccl"},
        {"prefill": 0, "decode": 0, "both": 1},
    ],
)
def test_tiny_model(tiny, tmp_path, options):
    with running(tiny, tmp_path / "logs", **options, ends_well=True) as cluster:
        check(cluster, tiny, 24)


def has_moved_pages(cluster: Cluster, name: str) -> bool:
    outcome = "sent" if name.startswith("prefill") else "received"
    return cluster.metric("baton_kv_transfers_total", name, outcome=outcome) > 0


def check_crowd(cluster: Cluster, path: Path, seed: int) -> None:
    """Prompts that nobody holds, more at once than one worker has the tokens for in a step."""
    crowd = [prompt_of(100 + number, seed=seed) for number in range(16)]
    with cluster.client() as client, ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda prompt: _stream(client, prompt, 8), crowd))
    assert results == [generate_reference(path)(tuple(prompt), 8) for prompt in crowd]


def test_two_to_two_with_pools_of_different_sizes(tiny, tmp_path):
    pages = {"prefill-0": 60, "prefill-1": 400, "decode-0": 50, "decode-1": 300}
    own = {name: {"num_pages": count} for name, count in pages.items()}
    with running(tiny, tmp_path / "logs", own=own, prefill=2, decode=2) as cluster:
        for name, count in pages.items():
            assert cluster.load(name).total_pages == count - 1, "all but the scratch page"
        check(cluster, tiny, 24)
        for seed in range(CROWDS):
            if all(has_moved_pages(cluster, name) for name in pages):
                break
            check_crowd(cluster, tiny, seed)
        for name in pages:
            assert has_moved_pages(cluster, name), f"{name} took no part"
            assert cluster.metric("baton_kv_stale_notifications_total", name) == 0


@pytest.mark.model
@pytest.mark.timeout(400)
def test_demo_model(demo_model, tmp_path):
    with running(demo_model, tmp_path / "logs") as cluster:
        check(cluster, demo_model, 8, every=4)
        with cluster.client() as client:
            turn = {"role": "user", "content": "What is the capital of France?"}
            answer = client.generate(messages=[turn], max_tokens=32, temperature=0.0)
        assert answer.text == "The capital of France is Paris."
        assert answer.finish_reason is FinishReason.END_OF_SEQUENCE
