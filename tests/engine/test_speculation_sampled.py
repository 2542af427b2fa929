"""Drafts change no drawn token: every option gives what the same engine gives without drafts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import Run, finish, running, submit
from speculation_kit import Oracle, Switching, speculating
from test_engine_structure import FORMED, PROMPT, wild
from tiny_models import write_tiny_model

from engine.engine import Engine
from engine.sampling import Sampler
from engine.speculation.tables import accepted
from engine.speculation.verifying import Draws
from engine.types import FailureReason, SamplingParams, StopRules, ThinkingBudget

VOCAB = 49152
WARM = SamplingParams(temperature=0.9, seed=7)
OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {"sampling": wild(3)},
    "cut": {"sampling": SamplingParams(temperature=1.2, seed=5, top_k=40, top_p=0.9)},
    "least": {"sampling": SamplingParams(temperature=1.4, seed=9, min_p=0.02)},
    "penalties": {
        "sampling": SamplingParams(
            temperature=0.7,
            seed=1,
            frequency_penalty=0.8,
            presence_penalty=0.4,
            repetition_penalty=1.3,
        )
    },
    "greedy penalties": {"sampling": SamplingParams(temperature=0, repetition_penalty=1.5)},
    "bias": {"sampling": wild(2, logit_bias={9: 8.0, 17: 7.0, 2: -100.0})},
    "min tokens": {
        "sampling": wild(2, logit_bias={0: 9.0, 9: 9.0}),
        "min_tokens": 17,
        "token_ids": frozenset({9}),
    },
    "three": {"sampling": wild(4), "choices": 3, "ignore_eos": True},
    "log probabilities": {"sampling": SamplingParams(temperature=1, seed=3, top_logprobs=4)},
    "of the prompt": {"sampling": WARM, "prompt_logprobs": True},
    "grammar": {"sampling": FORMED, "choices": 3},
    "allowed": {"sampling": wild(6, allowed_token_ids=(5, 6, 7, 8, 9))},
    "bad words": {
        "sampling": wild(6, allowed_token_ids=(5, 6, 7), bad_words=((5, 6), (7,), (6, 5, 5)))
    },
    "thinking": {
        "sampling": wild(1, thinking=ThinkingBudget(6, (), (21, 22, 23))),
        "min_tokens": 12,
    },
}
CASES = [
    pytest.param(name, script, marks=pytest.mark.slow)
    for name in OPTIONS
    for script in Oracle(VOCAB).scripts()
]


@pytest.fixture(scope="module")
def path(demo_model: Path, tmp_path_factory) -> Path:
    """Random weights with a real tokenizer."""
    folder = write_tiny_model(tmp_path_factory.mktemp("drawn"), vocab=VOCAB, tokenizer=False)
    shutil.copy(demo_model / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def alone(path: Path) -> Iterator[Engine]:
    """The engine without drafts."""
    with running(path) as engine:
        yield engine


def run(engine: Engine, name: str) -> Run:
    found = submit(engine, PROMPT, 48, **OPTIONS[name])
    finish(found)
    return found


def run_all(engine: Engine) -> dict[str, Run]:
    found = {name: submit(engine, PROMPT, 48, **OPTIONS[name]) for name in OPTIONS}
    finish(*found.values())
    return found


def scores(run: Run) -> np.ndarray:
    return np.array([record.top_logprobs for choice in run.records for record in choice])


@pytest.mark.parametrize(("name", "script"), CASES)
def test_every_option_gives_the_tokens_of_the_engine_without_drafts(
    path: Path, alone: Engine, name: str, script: str
) -> None:
    wanted, oracle = run(alone, name), Oracle(VOCAB)
    oracle.learn_run(wanted)
    with speculating(path, oracle.scripts()[script], Switching()) as engine:
        found = run(engine, name)
        load = engine.load().speculation
    assert found.tokens == wanted.tokens
    assert {i: end.reason for i, end in found.ends.items()} == {
        i: end.reason for i, end in wanted.ends.items()
    }
    if script == "half":
        assert load.accepted_tokens > 5, "nothing was tried"
    if OPTIONS[name]["sampling"].top_logprobs:
        assert np.abs(scores(found) - scores(wanted)).max() < 1e-3
        assert [[r.top_ids for r in c] for c in found.records] == [
            [r.top_ids for r in c] for c in wanted.records
        ]
    assert (found.scored is None) == (wanted.scored is None)


def test_all_options_in_one_batch(path: Path, alone: Engine) -> None:
    wanted, oracle = run_all(alone), Oracle(VOCAB)
    for each in wanted.values():
        oracle.learn_run(each)
    with speculating(path, oracle.half, Switching()) as engine:
        found = run_all(engine)
        load = engine.load().speculation
    assert load.accepted_tokens > 5 * len(OPTIONS)
    for name, each in wanted.items():
        assert found[name].tokens == each.tokens, name


def test_a_grammar_that_leaves_nothing_fails_alone(path: Path) -> None:
    with speculating(path, Oracle(VOCAB).random) as engine:
        doomed = submit(
            engine, PROMPT, 20, sampling=wild(1, allowed_token_ids=(5,), bad_words=((5,),))
        )
        well = submit(engine, PROMPT, 20, sampling=wild(1))
        doomed.done.wait(60)
        finish(well)
        assert doomed.failed.reason is FailureReason.NO_TOKEN


# -- the sampler alone --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "most"), [(3, 18.4), pytest.param(17, 44.9, marks=pytest.mark.slow)]
)
def test_tokens_behind_any_drafts_have_the_models_distribution(vocab: int, most: float) -> None:
    """Chi squared of each column, given that it counts: drafts that are always the likeliest token
    or always the least likely would show. `most`: 99.99 % of it with vocab - 1 degrees of
    freedom."""
    rows, width = 20_000, 4
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(size=(width, vocab)).astype(np.float32))
    sampler = Sampler(1, vocab, "cpu", [])
    nobody = np.zeros(0, np.int32)
    totals = np.zeros((2, width, vocab))
    for way, drafts in enumerate((logits.argmax(1), logits.argmin(1))):
        seen = 0
        while seen < 200_000 / width:
            sampler.assign(0, SamplingParams(1.0, seed=seen), StopRules(99), 0, nobody, nobody)
            slots, choices = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32)
            plan = sampler.plan(slots, slots, choices, known=False)
            ids = torch.cat((torch.zeros(1), drafts[:-1])).long().expand(rows, width)
            valid = torch.full((rows,), width)
            draws = Draws(
                torch.arange(width).expand(rows, width), ids, valid, torch.zeros(rows).long()
            )
            drawn = sampler.verify(logits, plan, draws)
            for column in range(width):
                own = drawn.tokens[drawn.counts > column, column].numpy()
                totals[way, column] += np.bincount(own, minlength=vocab)
            seen += rows
    samples = totals.sum(-1, keepdims=True)
    expected = samples * logits.softmax(-1).numpy()
    enough = expected >= 5
    chi = np.where(enough, (totals - expected) ** 2 / np.maximum(expected, 1), 0).sum(-1)
    assert (chi < most).all(), chi


def test_what_counts_ends_with_the_first_token_that_is_not_its_draft() -> None:
    ids = torch.tensor([[9, 1, 2, 3]] * 5)
    drawn = torch.tensor([[1, 2, 3, 4], [1, 2, 7, 4], [5, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    assert accepted(ids, drawn, torch.tensor([4, 4, 4, 2, 0])).tolist() == [4, 3, 1, 2, 0]
