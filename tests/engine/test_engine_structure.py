"""Outputs of a given form: each is one, and the path that it took does not show in its tokens."""

from __future__ import annotations

import json
import shutil
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from engine_kit import Run, build, check_baseline, finish, hand_off, running, submit
from llguidance import LLMatcher
from tiny_models import write_tiny_model
from tokenizers import Tokenizer

from engine.engine import Engine
from engine.masks.matchers import GrammarError, Matchers, TokenMatcher
from engine.masks.rules import MinTokens, bits_of
from engine.schedule.sequences import ActiveRequest
from engine.types import (
    EndReason,
    FailureReason,
    Mode,
    Request,
    SamplingParams,
    StopRules,
    ThinkingBudget,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = [401, 1200, 33, 17, 9000, 52, 77]


def grammar_of(schema: object) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": "[ \\n]?"})


def wild(seed: int = 0, **more) -> SamplingParams:
    return SamplingParams(temperature=1.5, seed=seed, **more)


FORMED = wild(grammar=grammar_of(PERSON))


@pytest.fixture(scope="module")
def path(demo_model: Path, tmp_path_factory) -> Path:
    """Random weights with a real tokenizer."""
    folder = write_tiny_model(tmp_path_factory.mktemp("formed"), vocab=49152, tokenizer=False)
    shutil.copy(demo_model / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def engine(path: Path):
    with running(path) as engine:
        yield engine


@pytest.fixture(scope="module")
def text_of(path: Path):
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return lambda tokens: tokenizer.decode(tokens)


def check(run: Run, text_of) -> None:
    for choice, tokens in enumerate(run.tokens):
        assert run.ends[choice].reason is EndReason.END_OF_SEQUENCE
        person = json.loads(text_of(tokens))
        assert set(person) == {"name", "age", "tags"}
        assert 0 <= person["age"] <= 150


def test_every_path_gives_the_same_tokens(engine: Engine, path: Path, text_of) -> None:
    whole = submit(engine, PROMPT, 96, choices=3, sampling=FORMED)
    finish(whole)
    check(whole, text_of)
    assert len({tuple(tokens) for tokens in whole.tokens}) == 3

    again = submit(engine, PROMPT, 96, choices=3, sampling=FORMED)
    beside = [submit(engine, PROMPT, 40, sampling=wild(7)) for _ in range(3)]
    finish(again, *beside)
    assert again.tokens == whole.tokens

    with running(path) as decode:
        handed = hand_off(engine, decode, PROMPT, 96, choices=3, sampling=FORMED)
        assert handed.tokens == whole.tokens

    for choice, tokens in enumerate(whole.tokens):
        for cut in (1, len(tokens) // 2, len(tokens) - 1):
            resumed = submit(
                engine,
                PROMPT,
                96,
                sampling=FORMED,
                generated=[tokens[:cut]],
                first_choice=choice,
            )
            finish(resumed)
            assert resumed.tokens[0] == tokens[cut:]


def test_preempted(path: Path) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 40}
    long = wild(grammar=grammar_of(numbers))
    alone = build(path)
    crowd = build(path, num_pages=24)
    try:
        runs = [
            [submit(one, PROMPT, 96, sampling=replace(long, seed=seed)) for seed in range(8)]
            for one in (alone, crowd)
        ]
        finish(*runs[0], *runs[1])
        assert [run.tokens for run in runs[0]] == [run.tokens for run in runs[1]]
        assert sum(run.ends[0].preemptions for run in runs[1])
        check_baseline(crowd)
    finally:
        alone.stop()
        crowd.stop()


def test_no_end_may_be_drawn_before_the_least_number_of_tokens() -> None:
    rule, end, others = MinTokens(3, [7], 64), bits_of([7], 64), bits_of([1, 40], 64)
    for index in range(5):
        bits = end | others
        rule.narrow(bits, index)
        assert (bits == (others if index < 3 else end | others)).all()
        alone = end.copy()
        rule.narrow(alone, index)
        assert (alone == end).all(), "nothing else was left"


def test_a_grammar_is_stronger_than_min_tokens(engine: Engine, text_of) -> None:
    formed = submit(engine, PROMPT, 96, sampling=FORMED, min_tokens=90)
    word = wild(grammar=LLMatcher.grammar_from_regex("[a-z]{1,100}"))
    longer = submit(engine, PROMPT, 96, sampling=word, min_tokens=20)
    finish(formed, longer)
    check(formed, text_of)
    assert len(longer.tokens[0]) > 20


def test_allowed_tokens_and_bad_words(engine: Engine) -> None:
    allowed = submit(engine, PROMPT, 30, sampling=wild(allowed_token_ids=(5, 6, 7)))
    finish(allowed)
    assert set(allowed.tokens[0]) == {5, 6, 7}
    few = wild(allowed_token_ids=(5, 6, 7, 8), bad_words=((6,), (5, 7)))
    narrowed = submit(engine, PROMPT, 30, sampling=few)
    finish(narrowed)
    tokens = narrowed.tokens[0]
    assert 6 not in tokens
    assert (5, 7) not in list(pairwise(tokens))
    assert set(tokens) == {5, 7, 8}


def test_thinking_ends_when_its_tokens_are_spent(engine: Engine) -> None:
    """The prompt has begun it; or the output does, or not. A resumed choice knows how far it is."""
    bound = ThinkingBudget(10, (), (9, 8))
    whole = submit(engine, PROMPT, 30, sampling=wild(thinking=bound))
    finish(whole)
    (tokens,) = whole.tokens
    assert tokens[10:12] == [9, 8]
    for cut in (5, 11, 15):
        resumed = submit(
            engine, PROMPT, 30, sampling=wild(thinking=bound), generated=[tokens[:cut]]
        )
        finish(resumed)
        assert resumed.tokens[0] == tokens[cut:]
    for first, bounded in ((7, True), (6, False)):
        begins = wild(thinking=ThinkingBudget(3, (7,), (9,)), bad_words=((0,),))
        run = submit(engine, PROMPT, 12, sampling=begins, generated=[[first]])
        finish(run)
        assert (run.tokens[0][2] == 9) == bounded
    done = submit(engine, PROMPT, 30, sampling=wild(thinking=bound), generated=[[1, 9, 8, 2]])
    finish(done)
    assert (9, 8) not in list(pairwise(done.tokens[0])), "it had ended by itself"


def test_a_grammar_that_cannot_be_made_is_never_admitted() -> None:
    """Also in the moment between its failure and the word of it."""
    failed: Future[list[TokenMatcher]] = Future()
    failed.set_exception(GrammarError("no"))
    request = Request(b"a", np.array(PROMPT, np.int32), FORMED, StopRules(2), Mode.WHOLE)
    assert not ActiveRequest(request, lambda _: None, 0, matchers=failed).is_prepared


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(((5,), (6,)), FailureReason.NO_TOKEN), (((5,), (5, 6)), None), (((5,), (6, 6)), None)],
)
def test_no_first_token_is_found_before_a_prompt_is_computed(
    bad: tuple[tuple[int, ...], ...], reason: FailureReason | None
) -> None:
    few = SamplingParams(allowed_token_ids=(5, 6), bad_words=bad)
    request = Request(b"a", np.array(PROMPT, np.int32), few, StopRules(9), Mode.WHOLE)
    matchers = Matchers("", 70, ())
    active = ActiveRequest(request, lambda _: None, 0, matchers=matchers.prepare(request))
    futures.wait([active.matchers])
    matchers.close()
    assert (active.is_prepared, active.lacks) == (reason is None, reason)


def test_one_request_without_a_token_fails_alone(engine: Engine) -> None:
    good = submit(engine, PROMPT, 96, sampling=FORMED)
    bad = {
        submit(engine, PROMPT, 96, sampling=wild(**fields)): reason
        for reason, fields in (
            (FailureReason.NO_TOKEN, {"grammar": FORMED.grammar, "allowed_token_ids": (5,)}),
            (FailureReason.NO_TOKEN, {"allowed_token_ids": (5, 6), "bad_words": ((5,), (6,))}),
            (FailureReason.STRUCTURE, {"grammar": '{"grammars": [{"lark": 3}]}'}),
        )
    }
    finish(good)
    for run, reason in bad.items():
        assert run.done.wait(30)
        assert run.failed is not None
        assert run.failed.reason is reason
    check_baseline(engine)


def test_masks_of_rules() -> None:
    from engine.masks.rules import bits_of

    bits = bits_of([0, 31, 32, 40, 99], 70)
    assert bits.dtype == np.int32
    assert len(bits) == 3
    unpacked = np.unpackbits(bits.view(np.uint8), bitorder="little")
    assert np.flatnonzero(unpacked).tolist() == [0, 31, 32, 40]
