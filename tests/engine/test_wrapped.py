"""Decoders through transformers' own code: greedy output equals transformers on every path of an
engine, and with a file of ours beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_kit import build, check_baseline, finish, hand_off, held, submit
from references import references
from test_families import (  # noqa: F401 - these run here, with the engines below
    CHUNK,
    CROWD,
    MAX_TOKENS,
    PAGES,
    Case,
    check,
    prompt_of,
    test_handed_off_and_resumed,
    test_whole_in_chunks_and_from_the_cache,
)
from tiny_models import write_tiny_model
from tiny_wrapped import PATHS, WRAPPED

from engine.types import SamplingParams

OWN = {"num_pages": PAGES, "max_sequences": CROWD, "max_step_tokens": 2 * CHUNK}
WRAP = {"model_impl": "transformers"}


@pytest.fixture(scope="module", params=PATHS)
def path(request, tmp_path_factory):
    own = WRAPPED[request.param]
    return write_tiny_model(tmp_path_factory.mktemp(request.param), **own)


@pytest.fixture(scope="module")
def case(path) -> Iterator[Case]:
    engines = build(path, **OWN, **WRAP), build(path, **OWN | {"max_step_tokens": CHUNK}, **WRAP)
    yield Case(*engines, references(path, whole=True))
    for engine in engines:
        check_baseline(engine)
        engine.stop()


def test_a_crowd_is_preempted_and_choices_draw_as_one(case):
    with held(case.one):
        runs = [submit(case.one, prompt_of(20 + i), 60, ignore_eos=True) for i in range(CROWD)]
    finish(*runs)
    # A window's pages let few in at once.
    assert case.one.load().preemptions > 0 or len(case.one.pools) > 1
    for run in runs:
        check(case, run, 60)
    prompt = prompt_of(37)
    handed = hand_off(case.other, case.one, prompt, MAX_TOKENS, choices=2, ignore_eos=True)
    want = case.answers(prompt, MAX_TOKENS, past_end=True).tokens
    assert handed.tokens == [want] * 2


def test_log_probabilities_and_drafts(case, path):
    prompt = prompt_of(40)
    plain = submit(case.one, prompt, 6, sampling=SamplingParams(temperature=0.0, top_logprobs=2),
                   prompt_logprobs=True, ignore_eos=True)  # fmt: skip
    finish(plain)
    engine = build(path, **OWN, **WRAP, speculation="suffix")
    try:
        for _ in range(2):
            run = submit(engine, prompt * 2, 24, ignore_eos=True)
            finish(run)
            check(case, run, 24)
        check_baseline(engine)
    finally:
        engine.stop()
    assert plain.scored is not None
    records = [*plain.scored.records, *plain.records[0]]
    ids = [*prompt, *plain.tokens[0]]
    want = _logprobs(path, ids)
    for position, record in enumerate(records):
        assert record.logprob == pytest.approx(float(want[position, ids[position + 1]]), abs=1e-4)


def _logprobs(path, ids: list[int]) -> torch.Tensor:
    from tiny_models import reference_model

    with torch.inference_mode():
        logits = reference_model(path, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)
