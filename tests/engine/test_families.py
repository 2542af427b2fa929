"""Greedy output of every family equals transformers, token for token, by every path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from engine_kit import build, finish, hand_off, stop, submit
from paths_kit import prompt_of
from references import References, references
from tiny_families import EVERY, SLOW
from tiny_models import write_tiny_model

from engine.engine import Engine

pytestmark = pytest.mark.timeout(300)
CHUNK, PAGES, CROWD = 32, 18, 6
MAX_TOKENS = 12


class Case(NamedTuple):
    """Two engines of one model, whose pools are too small for a crowd."""

    one: Engine
    other: Engine
    answers: References


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.matrix) if name in SLOW else name for name in EVERY
    ],
)
def case(request, tmp_path_factory) -> Iterator[Case]:
    path = write_tiny_model(tmp_path_factory.mktemp(request.param), **EVERY[request.param])
    options = {"num_pages": PAGES, "max_sequences": CROWD, "max_step_tokens": 2 * CHUNK}
    engines = build(path, **options), build(path, **{**options, "max_step_tokens": CHUNK})
    yield Case(*engines, references(path))
    stop(*engines)


def test_whole_in_chunks_and_from_the_cache(case):
    for engine, prompt in ((case.one, prompt_of(50)), (case.other, prompt_of(90))):
        for _ in range(2):
            run = submit(engine, prompt, MAX_TOKENS, ignore_eos=True)
            finish(run)
            case.answers.check(run, MAX_TOKENS)
        assert engine.load().prompt_tokens_cached > 0


def test_handed_off_and_resumed(case):
    prompt = prompt_of(45)
    run = hand_off(case.other, case.one, prompt, MAX_TOKENS, ignore_eos=True)
    case.answers.check(run, MAX_TOKENS)
    given = case.answers(prompt, MAX_TOKENS, past_end=True).tokens[:5]
    run = submit(case.other, prompt, MAX_TOKENS, generated=[given], ignore_eos=True)
    finish(run)
    case.answers.check(run, MAX_TOKENS, given=5)
