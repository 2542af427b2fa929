"""Hooks from a client's field to attention: in one process, and over a hand-off."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest
from cluster import running
from nursery import Nursery
from references import references
from streams import prompt_of
from tiny_models import write_tiny_model

from baton import LLM
from baton.errors import InvalidRequestError

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from hooks_kit import ALL, QUEST, installed

MAX_TOKENS = 16
SPARSE = "quest?sparse_tokens=256"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    with installed(tmp_path_factory.mktemp("installed"), ALL, QUEST):
        yield write_tiny_model(tmp_path_factory.mktemp("hooks") / "model", layers=4)


def answers(generate, model) -> None:
    """Dense where the client asks for it or the prompt is short; sparse otherwise."""
    reference = references(model)
    for length in (100, 500):
        want = reference(prompt_of(length), MAX_TOKENS).tokens
        options = {"token_ids": prompt_of(length), "max_tokens": MAX_TOKENS, "temperature": 0.0}
        assert list(generate(**options, extensions={"quest": "0"}).token_ids) == want
        assert (list(generate(**options).token_ids) == want) == (length < 256)
    for extensions, field in (
        ({"other": "1"}, "input.extensions"),
        ({"quest": "few"}, "input.extensions.quest"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{field}: "):
            generate(token_ids=[70], max_tokens=2, extensions=extensions)


def test_an_extension_reaches_its_hook(model):
    with LLM(model, hook=(SPARSE,), max_step_tokens=128, debug={"num_pages": 200}) as llm:
        want = references(model)(prompt_of(500), MAX_TOKENS).tokens
        options = {"token_ids": prompt_of(500), "max_tokens": MAX_TOKENS, "temperature": 0.0}
        assert list(llm.generate(**options, extensions={"quest": b"0"}).token_ids) == want
        assert list(llm.generate(**options).token_ids) != want


@pytest.mark.slow
def test_a_hand_off_to_a_worker_with_a_hook(model, tmp_path):
    options = {"hook": SPARSE, "local_prefill": "never"}
    # A nursery of its own, which knows where the hook is installed.
    with (
        closing(Nursery()) as nursery,
        running(model, tmp_path / "logs", launch=nursery.start, **options) as cluster,
    ):
        with cluster.client() as client:
            answers(client.generate, model)
        assert cluster.metric("baton_kv_transfers_total", "decode-0") >= 4
        cluster.check_baseline()
