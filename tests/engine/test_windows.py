"""Layers with a window free their pages, and greedy output equals transformers by every path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from engine_kit import Run, build, finish, hand_off, held, running, stop, submit
from paths_kit import prompt_of
from references import NOISE, References, first_difference, references
from suite_plugins import drawn
from tiny_families import EVERY
from tiny_models import write_tiny_model

from engine.config import EngineConfig
from engine.engine import Engine
from engine.groups.spec import Window
from engine.parts.paging import why_one_group

WINDOW, CHUNK, PAGE = 24, 64, 16
MAX_TOKENS = 40
FAST = (16, 25, 65, 200)
SLOW = (1, 15, 17, 23, 24, 39, 40, 41, 63, 64, 80, 127, 128, 129, 300)
BORDERS = [*FAST, *(pytest.param(length, marks=pytest.mark.slow) for length in SLOW)]
TINY = {
    "gpt_oss": EVERY["gpt_oss"],
    "gemma3": EVERY["gemma3"] | {"sliding_window": WINDOW},
    "gemma2": EVERY["gemma2"] | {"sliding_window": WINDOW},
    "olmo3": EVERY["olmo3"] | {"sliding_window": WINDOW},
    "phi3": EVERY["phi3"],  # Every layer has a window.
}
TWO = {"max_sequences": 6, "max_step_tokens": CHUNK, "max_context_tokens": 400}
TWO |= {"poison_freed_pages": True}


FAMILIES = [
    *drawn(["gpt_oss", "phi3"], 1),  # Windows in half of the layers, or in all.
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "gemma3", "olmo3")),
]


class Case(NamedTuple):
    """Two engines of one model, whose step and chunk differ."""

    one: Engine
    other: Engine
    answers: References


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> Iterator[Case]:
    path = write_tiny_model(tmp_path_factory.mktemp(request.param), **TINY[request.param])
    engines = build(path, **TWO), build(path, **TWO | {"max_step_tokens": 32})
    yield Case(*engines, references(path))
    stop(*engines)


def check(case: Case, run: Run, max_tokens: int = MAX_TOKENS, given: int = 0) -> None:
    """Every choice has the tokens of transformers up to the first that noise may decide."""
    want = case.answers(run.request.prompt_ids.tolist(), max_tokens, past_end=True)
    for tokens in run.tokens:
        found = want.tokens[:given] + tokens
        assert len(found) == max_tokens
        if found != want.tokens:
            at = first_difference(found, want.tokens)
            assert want.margins[at] < NOISE, f"token {at} differs"


@pytest.mark.parametrize("length", BORDERS)
def test_whole_in_chunks_and_from_the_cache(case, length):
    assert [spec.kind for spec in case.one.pools.specs[1:]] == [Window(WINDOW)]
    prompt = prompt_of(length)
    for engine in (case.one, case.other):
        for _ in range(3):
            before = engine.load().prompt_tokens_cached
            run = submit(engine, prompt, MAX_TOKENS, ignore_eos=True)
            finish(run)
            check(case, run)
        assert engine.load().prompt_tokens_cached - before == (length - 1) // PAGE * PAGE


@pytest.mark.parametrize("length", BORDERS)
@pytest.mark.parametrize("choices", [1, 3])
def test_handed_off(case, length, choices):
    prompt = prompt_of(length, seed=3)
    run = hand_off(case.other, case.one, prompt, MAX_TOKENS, choices=choices, ignore_eos=True)
    check(case, run)
    kept = Window(WINDOW).most_pages(PAGE)
    assert len(run.reserved.others[0].pages) <= min(kept, -(-length // PAGE))
    again = submit(case.one, prompt, MAX_TOKENS, ignore_eos=True)  # Behind the delivered window.
    finish(again)
    check(case, again)


@pytest.mark.parametrize("length", [40, 97, 200])
def test_forked_and_resumed(case, length):
    prompt = prompt_of(length, seed=4)
    run = submit(case.one, prompt, MAX_TOKENS, choices=3, ignore_eos=True)
    finish(run)
    check(case, run)
    given = case.answers(prompt, MAX_TOKENS, past_end=True).tokens[:17]
    run = submit(case.other, prompt, MAX_TOKENS, generated=[given], ignore_eos=True)
    finish(run)
    check(case, run, given=17)


def test_preempted(case):
    with running(case.one.model.path, **TWO | {"num_pages": 26}) as engine:
        prompts = [prompt_of(20 + i, seed=5) for i in range(6)]
        with held(engine):
            runs = [submit(engine, prompt, 80, ignore_eos=True) for prompt in prompts]
        finish(*runs)
        first, window = engine.pools
        if window.page_bytes <= first.page_bytes:  # Else windows let fewer sequences run.
            assert engine.load().preemptions > 0
        for run in runs:
            check(case, run, 80)


def test_more_sequences_than_the_windows_have_room_for(case):
    """Windows as large as group 0: the rest waits, and nobody is preempted for a window."""
    with running(case.one.model.path, **TWO | {"max_sequences": 24, "num_pages": 60}) as engine:
        prompts = [prompt_of(17 + i, seed=6) for i in range(24)]
        with held(engine):
            runs = [submit(engine, prompt, 30, ignore_eos=True) for prompt in prompts]
        finish(*runs)
        for run in runs:
            check(case, run, 30)
        assert engine.load().damaged_pages == 0


@pytest.mark.parametrize("count", [10, pytest.param(80, marks=pytest.mark.slow)])
def test_a_small_pool_over_host_memory_speaks_as_a_large_one(tmp_path, count):
    """Prompts go on behind pages of both groups that came back from host memory."""
    path = write_tiny_model(tmp_path, **TINY["gpt_oss"])
    prompts = [prompt_of(30 + 5 * (at % 9), seed=at) for at in range(count)]
    answers = []
    for options in ({}, {"num_pages": 31, "kv_host_bytes": 24 << 20}):
        with running(path, **TWO | options) as engine:
            assert len(engine.pools) == 2
            said = [list(prompt) for prompt in prompts]
            for _ in range(2):
                for at, prompt in enumerate(said):
                    run = submit(engine, prompt, 6, ignore_eos=True)
                    finish(run)
                    said[at] = [*prompt, *run.tokens[0], 7, at % 300 + 1]
            answers.append(said)
            load = engine.load()
    assert answers[0] == answers[1]
    assert load.tiers.loaded_tokens["host"] >= 3 * count
    assert load.tiers.late == {}


def test_where_one_group_is_left():
    config = EngineConfig(model="m", kv_host_bytes=1 << 30, tp=2, kv_stores=("disk:kv",))
    assert why_one_group(config) == ""
    assert "hooks" in why_one_group(replace(config, hooks=("a:b",)))
