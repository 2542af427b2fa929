"""A prefill worker computes what a draft head keeps. Without it, or with that of another head,
drafts are worse and tokens the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import build, finish, hand_off, running, submit
from heads_kit import PlainHead, config_of, write_head, write_oracle
from references import references
from test_heads import ALL_TAPS, SHORT, drafting, prompts_of
from test_tiers_engine import SMALL, conversations, talk
from test_tiers_stores import SMALL as STORED
from test_tiers_stores import conversations as stored_conversations
from tiny_families import EVERY, HYBRIDS
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.types import Mode


def prefilling(model: Path, **options):
    """A worker that decodes nothing."""
    return running(model, decodes=False, **{"max_step_tokens": 48, **options})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False, layers=5)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("oracle")
    write_oracle(folder / "model", folder / "head")
    return folder / "model", folder / "head"


@pytest.mark.parametrize("kv", ["auto", pytest.param("fp8", marks=pytest.mark.slow)])
def test_kv_of_a_head_is_handed_off(model, tmp_path, kv: str) -> None:
    """Cold, and behind pages that the decode worker has: all that is there is as if computed by one
    worker."""
    head = write_head(tmp_path / "head", model)
    answers, plain = references(model), PlainHead(head, model)
    known = prompts_of()[5]
    # The last place of a cached page was computed with the token that followed there.
    longer = [*known, answers(known, 1, past_end=True).tokens[0], 8, 9]
    with (
        prefilling(model, speculation=str(head), kv_cache_dtype=kv) as prefill,
        drafting(model, head, kv_cache_dtype=kv) as (decode, told),
    ):
        for prompt in (*prompts_of()[3:6], longer):
            run = hand_off(prefill, decode, prompt, SHORT, ignore_eos=True)
            if kv == "auto":
                assert run.tokens == [answers(prompt, SHORT, past_end=True).tokens]
    whole = []
    with drafting(model, head, kv_cache_dtype=kv) as (engine, alone):
        for prompt in prompts_of()[3:6]:
            finish(submit(engine, prompt, SHORT, ignore_eos=True))
    for tokens, drafted in told.items():
        if tokens in alone:
            assert drafted.tokens == alone[tokens].tokens
            torch.testing.assert_close(drafted.k, alone[tokens].k, rtol=1e-2, atol=1e-2)
            whole.append(tokens)
        elif kv == "auto":
            assert drafted.tokens == plain.draft(tokens, len(drafted.tokens)).tokens
    assert len(whole) > SHORT


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_windows_and_states(tmp_path, family: str) -> None:
    """The head's pages are those of group 0, which both have. Steps over states verify nothing."""
    options = {**EVERY, **HYBRIDS}[family]
    model = write_tiny_model(tmp_path / "model", tokenizer=False, **options)
    head = write_head(tmp_path / "head", model, "speculators")
    taps = {ALL_TAPS: [0, 1, config_of(model)["num_hidden_layers"]]}
    (head / "config.json").write_text(json.dumps(config_of(head) | taps))
    alone, prompts = build(model, max_step_tokens=256), prompts_of()[3:]
    runs = [submit(alone, prompt, SHORT, ignore_eos=True) for prompt in prompts]
    finish(*runs)
    alone.stop()
    with (
        drafting(model, head, max_step_tokens=256) as (engine, _),
        prefilling(model, speculation=str(head), max_step_tokens=256) as prefill,
    ):
        for prompt, wanted in zip(prompts, runs, strict=True):
            run = submit(engine, prompt, SHORT, ignore_eos=True)
            finish(run)
            assert run.tokens == wanted.tokens
        handed = hand_off(prefill, engine, prompts[-1], SHORT, ignore_eos=True)
        assert handed.tokens == runs[-1].tokens
        assert (engine.load().speculation.drafted_tokens > 0) == (family == "gemma3")


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.usefixtures("no_hurry")
def test_pages_from_lower_tiers_do_without(model, tmp_path, tier: str) -> None:
    head = write_head(tmp_path / "head", model)
    prompts, small, large = conversations(24), SMALL, {"num_pages": 1600}
    if tier == "disk":
        prompts, store = stored_conversations(24), (f"disk:{tmp_path}/kv?gib=0.1",)
        large |= {"page_size": STORED["page_size"]}
        small = STORED | {"kv_stores": store, "max_context_tokens": 1024}
    with running(model, **large) as plain:
        wanted = talk(plain, prompts, 2)
    with drafting(model, head, **small) as (engine, _):
        assert talk(engine, prompts, 2) == wanted
        assert engine.load().tiers.loaded_tokens[tier] > 0
        lacking = engine._loop._scheduler.blocks.arrivals._lacks
        assert lacking.any()
        assert not lacking.all()
        wait_until(lambda: engine.load().tiers.held_slots == 0)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.usefixtures("no_hurry")
def test_pages_that_lack_it_are_told_and_not_read(model, tmp_path, whole: bool) -> None:
    """A prefill worker has the first pages of a prompt from host memory. What a head keeps of the
    others is read, and no more. `whole`: the decode worker has had the prompt before."""
    head = write_head(tmp_path / "head", model)
    plain, answers = PlainHead(head, model), references(model)
    prompt, others = prompts_of()[6], conversations(12)
    tiers = {**SMALL, "num_pages": 21}
    with (
        prefilling(model, speculation=str(head), **tiers) as prefill,
        drafting(model, head) as (decode, told),
    ):
        for each in (prompt[:80], *others):  # It is driven out.
            held = submit(prefill, each, 1, mode=Mode.PREFILL)
            finish(held)
            prefill.release(held.request.id)
        if whole:
            finish(submit(decode, prompt[:32], 4, ignore_eos=True))
            told.clear()
        run = hand_off(prefill, decode, prompt, SHORT, ignore_eos=True)
        assert run.tokens == [answers(prompt, SHORT, past_end=True).tokens]
        assert prefill.load().tiers.loaded_tokens["host"] == 80
        lacking = np.flatnonzero(decode._loop._scheduler.blocks.arrivals._lacks)
        assert len(lacking) == (3 if whole else 5)
    for tokens, drafted in told.items():
        wanted = plain.draft(tokens, max(1, len(drafted.tokens)), first=80)
        assert drafted.tokens == wanted.tokens
        torch.testing.assert_close(drafted.k[80:], wanted.k[80:], rtol=1e-3, atol=1e-3)
        assert not drafted.k[32:80].any()
    assert len(told) > SHORT // 2


def share(prefill, oracle, **options) -> tuple[float, int]:
    """The share of drafts that are right behind a hand-off, and how many there were."""
    model, head = oracle
    answers = references(model)
    with drafting(model, head, **options) as (decode, _):
        for prompt in prompts_of()[4:]:
            prompt = [token % 96 for token in prompt]
            run = hand_off(prefill, decode, prompt, 40, ignore_eos=True)
            assert run.tokens == [answers(prompt, 40, past_end=True).tokens]
        load = decode.load().speculation
    return load.accepted_tokens / max(1, load.drafted_tokens), load.drafted_tokens


def test_another_head_or_none_costs_speed_alone(oracle, tmp_path) -> None:
    model, head = oracle
    other = write_head(tmp_path / "other", model, drafted=90)
    shares = []
    for options in ({"speculation": str(head)}, {}, {"speculation": str(other)}):
        with prefilling(model, **options) as prefill:
            shares.append(share(prefill, oracle))
    assert shares[0][0] > 0.9
    assert all(drafted > 50 for _, drafted in shares)


def test_the_number_of_drafts_may_differ(oracle) -> None:
    model, head = oracle
    with prefilling(model, speculation=str(head), draft_tokens=1) as prefill:
        assert share(prefill, oracle)[0] > 0.9


@pytest.mark.parametrize("choices", [1, 3])
def test_choices_and_resumption(model, tmp_path, choices: int) -> None:
    head = write_head(tmp_path / "head", model)
    answers = references(model)
    with (
        prefilling(model, speculation=str(head)) as prefill,
        drafting(model, head) as (decode, _),
    ):
        for prompt in prompts_of()[2:5]:
            wanted = answers(prompt, SHORT, past_end=True).tokens
            run = hand_off(prefill, decode, prompt, SHORT, choices=choices, ignore_eos=True)
            assert run.tokens == [wanted] * choices
            resumed = submit(
                decode, prompt, SHORT, ignore_eos=True, generated=[wanted[:5]] * choices,
                choices=choices,
            )  # fmt: skip
            finish(resumed)
            assert resumed.tokens == [wanted[5:]] * choices
