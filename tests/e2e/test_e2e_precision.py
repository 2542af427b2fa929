"""Weights in FP8 through real processes and NIXL: the tokens of transformers that rounds alike."""

from __future__ import annotations

import pytest
from cluster import Cluster, running, spawn
from quantised_folders import fp8_reference
from references import Reference as Answer
from references import References, first_difference
from streams import prompt_of
from test_precision_paths import ONLINE, TINY_FLIP, demo_prompts, make
from tiny_models import write_tiny_model

MAX_TOKENS = 8
LENGTHS = (1, 16, 33, 200)
DEMO_FORMS = (ONLINE, "pack-quantized-group")


def check(cluster: Cluster, answers: References, prompts: list[list[int]]) -> None:
    """Each prompt alone, twice: the second time its pages are cached; then three choices."""
    with cluster.client() as client:
        for prompt in prompts:
            want = answers(prompt, MAX_TOKENS)
            for choices in (1, 1, 3):
                found = client.generate(
                    token_ids=prompt, max_tokens=MAX_TOKENS, temperature=0.0, choices=choices
                )
                assert len(found.choices) == choices
                for choice in found.choices:
                    equal_past_ties(list(choice.token_ids), want, answers.noise)
    assert cluster.metric("baton_kv_transfers_total", "decode-0", outcome="received") > 0
    cluster.check_baseline()


def equal_past_ties(found: list[int], want: Answer, noise: float) -> None:
    if found != want.tokens:
        at = first_difference(found, want.tokens)
        assert at < len(want.tokens)
        assert want.margins[at] < noise


def test_a_tiny_model_in_fp8(tmp_path):
    path = write_tiny_model(tmp_path / "model")
    answers = References(path, ONLINE, lambda: fp8_reference(path).model, TINY_FLIP)
    options = {"local_prefill": "never", "quantization": "fp8"}
    with running(path, tmp_path / "logs", ends_well=True, **options) as cluster:
        check(cluster, answers, [prompt_of(length) for length in LENGTHS])


@pytest.mark.matrix
@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", DEMO_FORMS)
def test_the_demo_model(form, demo_model, tmp_path):
    case = make(demo_model, tmp_path / "model", form, demo_prompts(demo_model), is_demo=True)
    settings = {"local_prefill": "never", **case.options}
    logs = tmp_path / "logs"
    with running(case.folder, logs, ends_well=True, launch=spawn, **settings) as cluster:
        check(cluster, case.answers, case.prompts)
