"""Drafts change no token, whatever they are: greedy output is that of transformers."""

from __future__ import annotations

import numpy as np
import pytest
from engine_kit import Run, build, finish, hand_off, held, running, submit
from references import references
from speculation_kit import Oracle, Switching, speculating
from tiny_families import EVERY
from tiny_models import write_tiny_model

from engine.engine import Engine, EngineError
from engine.speculation.widths import FixedWidth

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 200)
VOCAB = 384
TOKENS = 40
SCRIPTS = tuple(Oracle(VOCAB).scripts())
WINDOWED = [
    "gpt_oss",
    "phi3",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma3", "lfm2")),
]
FAMILIES = {"llama": {}, "mistral": {"family": "mistral", "sliding_window": 24}, **EVERY}


def prompts_of(seed: int = 0) -> list[list[int]]:
    return [
        np.random.default_rng(seed * 1000 + length).integers(1, VOCAB, length).tolist()
        for length in LENGTHS
    ]


class Told:
    """A model, its answers, and an oracle that knows them."""

    def __init__(self, path, **more) -> None:
        answers = references(path, **more)
        self.path = path
        self.oracle = Oracle(VOCAB)
        self.prompts = prompts_of()
        self.wanted = [answers(prompt, TOKENS, past_end=True).tokens for prompt in self.prompts]
        for prompt, wanted in zip(self.prompts, self.wanted, strict=True):
            self.oracle.learn(prompt, [wanted])

    def run(self, engine: Engine) -> list[Run]:
        runs = [submit(engine, prompt, TOKENS, ignore_eos=True) for prompt in self.prompts]
        finish(*runs)
        for run, wanted in zip(runs, self.wanted, strict=True):
            assert run.tokens == [wanted]
        return runs


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Told:
    return Told(write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False))


@pytest.mark.parametrize("script", SCRIPTS)
def test_greedy_is_that_of_transformers_with_any_drafts(told: Told, script: str) -> None:
    with speculating(told.path, told.oracle.scripts()[script], Switching()) as engine:
        told.run(engine)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("width", [*range(1, 9), 0])
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_width_and_page(told: Told, script: str, width: int, page_size: int) -> None:
    widths = FixedWidth(width) if width else Switching()
    options = {"page_size": page_size, "num_pages": 3200 // page_size}
    with speculating(told.path, told.oracle.scripts()[script], widths, **options) as engine:
        told.run(engine)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["right", "half"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(tmp_path_factory, family: str, script: str) -> None:
    folder = tmp_path_factory.mktemp(family)
    told = Told(write_tiny_model(folder, tokenizer=False, **FAMILIES[family]))
    with speculating(told.path, told.oracle.scripts()[script], Switching()) as engine:
        told.run(engine)


def test_right_drafts_save_steps_and_are_counted(told: Told) -> None:
    with speculating(told.path, told.oracle.right) as engine:
        told.run(engine)
        load = engine.load()
    assert load.steps < TOKENS / 2
    assert load.speculation is not None
    assert load.speculation.accepted_tokens > 0.9 * load.speculation.drafted_tokens > 0


@pytest.fixture(scope="module", params=WINDOWED)
def windowed(request, tmp_path_factory) -> Told:
    options = FAMILIES[request.param]
    return Told(write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, **options))


@pytest.mark.parametrize("page_size", [16, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", ["right", "half", "random"])
def test_windows_have_pages_for_drafts(windowed: Told, script: str, page_size: int) -> None:
    options = {"page_size": page_size, "num_pages": 3200 // page_size, "max_context_tokens": 400}
    options["poison_freed_pages"] = True
    widths = None if script == "right" else Switching()
    with speculating(windowed.path, windowed.oracle.scripts()[script], widths, **options) as engine:
        assert len(engine.pools) > 1
        windowed.run(engine)
        load = engine.load()
    assert script != "right" or load.speculation.accepted_tokens > 200  # Of 320 tokens.
    assert load.preemptions == load.damaged_pages == 0


def test_a_request_may_do_without(told: Told) -> None:
    with speculating(told.path, told.oracle.right) as engine:
        run = submit(engine, told.prompts[3], TOKENS, ignore_eos=True, speculates=False)
        finish(run)
        load = engine.load()
    assert run.tokens == [told.wanted[3]]
    assert load.steps >= TOKENS
    assert load.speculation.drafted_tokens == 0


def test_a_short_pool_narrows_rows_and_preempts_as_without_drafts(told: Told) -> None:
    prompts = told.prompts[:4]
    options = {"num_pages": 10, "max_sequences": 6, "max_step_tokens": 64}
    with speculating(told.path, told.oracle.wrong, **options) as engine:
        with held(engine):
            runs = [submit(engine, prompt, TOKENS, ignore_eos=True) for prompt in prompts]
        finish(*runs)
        assert engine.load().preemptions > 0
    for prompt, run in zip(prompts, runs, strict=True):
        assert run.tokens == [told.wanted[told.prompts.index(prompt)]]


@pytest.mark.parametrize("choices", [1, 3])
def test_handed_off_and_resumed(told: Told, choices: int) -> None:
    speculates = speculating(told.path, told.oracle.half, Switching())
    with running(told.path, max_step_tokens=32) as prefill, speculates as decode:
        for prompt, wanted in zip(told.prompts[2:], told.wanted[2:], strict=True):
            more = {"choices": choices, "ignore_eos": True}
            run = hand_off(prefill, decode, prompt, TOKENS, **more)
            assert run.tokens == [wanted] * choices
        resumed = submit(
            decode, prompt, TOKENS, ignore_eos=True, generated=[wanted[:7]] * choices,
            choices=choices,
        )  # fmt: skip
        finish(resumed)
        assert resumed.tokens == [wanted[7:]] * choices


def test_an_end_inside_a_run_drops_what_is_behind_it(told: Told) -> None:
    """At each column of a step: stop ids, and the limit."""
    prompt, wanted = told.prompts[4], told.wanted[4]
    with speculating(told.path, told.oracle.right) as engine:
        for at in range(1, 20):
            first = wanted.index(wanted[at])
            by_token = submit(engine, prompt, TOKENS, token_ids=frozenset({wanted[at]}))
            by_length = submit(engine, prompt, at + 1, ignore_eos=True)
            finish(by_token, by_length)
            assert by_token.tokens == [wanted[: first + 1]]
            assert by_length.tokens == [wanted[: at + 1]]
            assert by_length.ends[0].output_tokens == at + 1


def test_pages_of_an_answer_are_found_again(told: Told) -> None:
    """Only what counted is keyed, though drafts that failed were stored behind it."""
    prompt, wanted = told.prompts[5], told.wanted[5]
    with speculating(told.path, told.oracle.half) as engine:
        finish(submit(engine, prompt, TOKENS, ignore_eos=True))
        before = engine.load().prompt_tokens_cached
        run = submit(engine, [*prompt, *wanted[:33]], 7, ignore_eos=True)
        finish(run)
        assert engine.load().prompt_tokens_cached - before == 96
    assert run.tokens == [wanted[33:]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculation": "medusa"}, "'medusa' is not one of suffix, mtp, off"),
        ({"speculation": "suffix", "draft_tokens": 8}, "draft_tokens 8 must be from 1 to 7"),
        ({"speculation": "suffix", "draft_tokens": 0}, "draft_tokens 0 must be from 1 to 7"),
    ],
)
def test_what_cannot_be_is_refused_by_name(told: Told, options, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        build(told.path, **options)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_accept_alike(told: Told, tp: int) -> None:
    with speculating(told.path, tp=tp) as engine:
        told.run(engine)
        assert engine.load().speculation.accepted_tokens > 0
