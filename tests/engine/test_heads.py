"""Draft heads draft what plain PyTorch says, change no token, and are refused where they do not
fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import build, check_baseline, finish, held, running, stop, submit
from heads_kit import FORMATS, TAPS, Drafted, PlainHead, config_of, write_head, write_oracle
from references import references
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_model

from engine.beams.params import BeamParams
from engine.eager.heads import HeadDrafter
from engine.engine import Engine, EngineError
from engine.model import ModelError
from engine.types import SamplingParams

VOCAB, TOKENS, SHORT, DRAFTS = 384, 30, 12, 4
ALL_TAPS = "eagle_aux_hidden_state_layer_ids"
LENGTHS = (1, 2, 15, 16, 17, 64, 150)
Told = dict[tuple[int, ...], Drafted]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False, layers=5)


def prompts_of() -> list[list[int]]:
    return [np.random.default_rng(length).integers(1, VOCAB, length).tolist() for length in LENGTHS]


def drafter_of(engine: Engine) -> HeadDrafter:
    return engine._loop._executor.steps._head


@contextmanager
def drafting(model: Path, head: Path, **options) -> Iterator[tuple[Engine, Told]]:
    """An engine with a head; what it has drafted behind all tokens of a sequence, and its KV of
    them."""
    told: Told = {}
    engine = build(model, speculation=str(head), draft_tokens=DRAFTS, **options)
    drafter = drafter_of(engine)
    draft = drafter.draft

    def record(tables, slots):
        found = draft(tables, slots)
        rows = drafter._learnt.plan.page_table[drafter._learnt.rows]
        for row, slot in enumerate(slots.tolist()):
            length = int(tables.length[slot])
            tokens = tuple(tables.history[slot, : length + 1].tolist())
            places = drafter._pool.places(torch.from_numpy(rows[row]).long())
            k, v = (each[:, :length].transpose(0, 1) for each in drafter._pool.gather(0, places))
            told[tokens] = Drafted(found.ids[row, : int(found.ready[row])].tolist(), k, v)
        return found

    drafter.draft = record
    try:
        yield engine, told
        check_baseline(engine)
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("form", "before"),
    [
        ("original", False),
        ("speculators", True),
        pytest.param("original", True, marks=pytest.mark.slow),
        pytest.param("speculators", False, marks=pytest.mark.slow),
    ],
)
def test_drafts_and_kv_are_those_of_plain_pytorch(model, tmp_path, form: str, before: bool) -> None:
    head = write_head(tmp_path / "head", model, form, norm_before_residual=before)
    answers, plain = references(model), PlainHead(head, model)
    prompts = prompts_of()[::2]
    with drafting(model, head, max_step_tokens=48) as (engine, told):
        runs = [submit(engine, prompt, SHORT, ignore_eos=True) for prompt in prompts]
        finish(*runs)
        for prompt, run in zip(prompts, runs, strict=True):
            assert run.tokens == [answers(prompt, SHORT, past_end=True).tokens]
    assert len(told) > 2 * SHORT
    seen = list(told.items())[::3]
    for tokens, drafted in seen:
        wanted = plain.draft(tokens, max(1, len(drafted.tokens)))
        assert drafted.tokens == wanted.tokens
        torch.testing.assert_close(drafted.k, wanted.k, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(drafted.v, wanted.v, rtol=1e-3, atol=1e-3)
    assert sum(len(drafted.tokens) == DRAFTS for _, drafted in seen) > 0.8 * len(seen)


# -- what a head may not change ---------------------------------------------------------------

OPTIONS = (
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 9, "top_k": 20, "frequency_penalty": 0.4, "top_logprobs": 2},
    {"temperature": 1.0, "seed": 5, "allowed_token_ids": tuple(range(3, 60))},
)


@pytest.fixture(scope="module")
def head(model, tmp_path_factory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), model)


def drawn(engine: Engine) -> list[list[list[int]]]:
    """Answers that are drawn, of one and of several choices."""
    with held(engine):
        runs = [
            submit(
                engine, prompt, TOKENS, choices=1 + index % 3, ignore_eos=True,
                sampling=SamplingParams(**OPTIONS[index % len(OPTIONS)]),
            )
            for index, prompt in enumerate(prompts_of())
        ]  # fmt: skip
    finish(*runs)
    return [run.tokens for run in runs]


CASES = {
    "plain": {},
    "small pages": {"page_size": 4, "num_pages": 800},
    "cut prompts": {"max_step_tokens": 32},
    "no cache": {"prefix_cache": False},
    "preempted": {"num_pages": 18, "max_sequences": 8, "max_step_tokens": 64},
    "fp8 kv": {"kv_cache_dtype": "fp8"},
}
FAST = ("plain", "preempted")


@pytest.mark.parametrize(
    "case",
    [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_drawn_tokens_are_those_without_a_head(model, head, case: str) -> None:
    options = CASES[case]
    with running(model, **options) as without:
        wanted = drawn(without)
    with drafting(model, head, **options) as (engine, told):
        assert drawn(engine) == wanted
        assert drawn(engine) == wanted, "from the cache"
        assert engine.load().speculation.drafted_tokens > 0
        assert case != "preempted" or engine.load().preemptions > 0
    assert any(told.values())


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_draft_alike(model, head, tp: int) -> None:
    answers = references(model)
    engines = [build(model, speculation=str(head), draft_tokens=DRAFTS, tp=n) for n in (1, tp)]
    figures = []
    for engine in engines:
        prompts = prompts_of()[::2]
        runs = [submit(engine, prompt, SHORT, ignore_eos=True) for prompt in prompts]
        finish(*runs)
        for prompt, run in zip(prompts, runs, strict=True):
            assert run.tokens == [answers(prompt, SHORT, past_end=True).tokens]
        drawn(engine)
        figures.append(engine.load().speculation.drafted_tokens)
        stop(engine)
    assert figures[1] > 0.9 * figures[0] > 0


def test_beams_are_those_without_a_head(model, head) -> None:
    """They draft nothing, and share no page that is ahead of their tokens."""
    found = []
    for options in ({}, {"speculation": str(head), "draft_tokens": DRAFTS}):
        with running(model, **options) as engine:
            runs = [submit(engine, prompt, 48, beams=BeamParams(4)) for prompt in prompts_of()[::3]]
            finish(*runs)
            found.append([run.tokens for run in runs])
    assert found[0] == found[1]


def accepted(model: Path, head: Path, **options) -> float:
    """The share of drafts that are right."""
    with drafting(model, head, **options) as (engine, _):
        prompts = [[token % 96 for token in prompt] for prompt in prompts_of()]
        finish(*(submit(engine, prompt, 60, ignore_eos=True) for prompt in prompts))
        load = engine.load().speculation
        assert load.drafted_tokens > 100
        return load.accepted_tokens / load.drafted_tokens


@pytest.mark.parametrize("form", FORMATS)
def test_a_head_that_knows_is_believed(tmp_path, form: str) -> None:
    model, head = tmp_path / "model", tmp_path / "head"
    write_oracle(model, head, form)
    assert accepted(model, head, page_size=4, num_pages=800) > 0.9


def test_taps_of_other_layers_are_of_no_use(tmp_path) -> None:
    for shift in (-1, 1):
        model, head = tmp_path / f"model{shift}", tmp_path / f"head{shift}"
        write_oracle(model, head, taps=[tap + shift for tap in TAPS])
        assert accepted(model, head) < 0.3


def test_a_head_of_nan_fails_nobody(model, tmp_path) -> None:
    head = write_head(tmp_path / "head", model)
    weights = load_file(head / "model.safetensors")
    for name, each in weights.items():
        if each.is_floating_point() and "norm" not in name:
            each.fill_(float("nan"))
    save_file(weights, head / "model.safetensors")
    with drafting(model, head) as (engine, _):
        for prompt in prompts_of()[::2]:
            run = submit(engine, prompt, SHORT, ignore_eos=True)
            finish(run)
            assert run.tokens == [references(model)(prompt, SHORT, past_end=True).tokens]


def test_nothing_is_drafted_behind_what_a_head_knows(model, tmp_path) -> None:
    head = write_head(tmp_path / "head", model, max_position_embeddings=24)
    with drafting(model, head) as (engine, told):
        run = submit(engine, list(range(1, 10)), TOKENS, ignore_eos=True)
        finish(run)
    assert {len(drafted.tokens) for tokens, drafted in told.items() if len(tokens) < 20} == {DRAFTS}
    assert {len(drafted.tokens) for tokens, drafted in told.items() if len(tokens) > 25} == {0}


# -- heads that do not fit --------------------------------------------------------------------

VERIFIER = {"verifier": {"name_or_path": "x/Other", "architectures": ["OtherForCausalLM"]}}
BAD_CONFIGS = (
    ("original", {"vocab_size": 500}, "vocab_size is 500, and 384 is needed"),
    ("original", {"hidden_size": 128}, "hidden size is 128, and 64 is needed"),
    ("original", {"target_hidden_size": 32}, "target hidden size is 32, and 64 is needed"),
    ("original", {"num_hidden_layers": 2}, "num_hidden_layers is 2, and 1 is needed"),
    ("original", {"architectures": ["EagleModel"]}, "no draft head: its architecture is EagleMod"),
    ("original", {"draft_vocab_size": 999}, "draft_vocab_size is 999, of 384 tokens"),
    ("original", {"draft_vocab_size": 100}, "d2t is .200,., of 100 tokens"),
    ("original", {"norm_output": True}, "norm_output is set, which is not built"),
    ("original", {"model_type": "qwen3"}, "layer is a qwen3; supported is llama"),
    ("original", {"eagle_config": {"use_aux_hidden_state": False}}, "a head without taps"),
    ("original", {"intermediate_size": 96}, r"mlp.gate_proj.weight has shape .128, 64., and .96"),
    ("speculators", {"speculators_model_type": "dflash"}, "dflash is not supported; eagle3 is"),
    ("speculators", {"speculators_config": VERIFIER}, "made for x/Other .OtherForCausalLM., and"),
    ("speculators", {"norm_before_residual": None}, "does not say norm_before_residual"),
    ("speculators", {"transformer_layer_config": None}, "has no transformer_layer_config"),
    ("speculators", {ALL_TAPS: [2, 3, 9]}, "reads what enters layer 9, and this model has 5 lay"),
    ("speculators", {ALL_TAPS: [2, 3]}, r"fc.weight has shape .64, 192., and .64, 128. is needed"),
    ("speculators", {ALL_TAPS: "all"}, "is 'all', and no list of layers"),
)  # fmt: skip
BAD_TENSORS = (
    ("d2t", lambda each: each + 300, "d2t names tokens beyond the 384"),
    ("d2t", None, "drafts 200 of 384 tokens, and has no d2t"),
    ("t2d", lambda each: each[:100], r"t2d is .100,., and the model has 384"),
    ("fc.weight", None, "it has no fc.weight"),
    ("lm_head.weight", None, "drafts some tokens of the model, and has no lm_head"),
    ("norm.weight", lambda each: each[:10], r"norm.weight has shape .10., and .64. is needed"),
    ("other", lambda _: torch.zeros(3), "other is unknown"),
)


@pytest.fixture
def unread(monkeypatch) -> None:
    """Weights must not be read."""

    def fill(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("engine.model.loading.fill", fill)


@pytest.mark.parametrize(("form", "change", "words"), BAD_CONFIGS)
def test_a_head_of_something_else_is_refused(
    model, tmp_path, unread, form: str, change: dict, words: str
) -> None:
    head = write_head(tmp_path / "head", model, form)
    stated = config_of(head) | change
    stated = {name: each for name, each in stated.items() if each is not None}
    (head / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ModelError, match=words):
        build(model, speculation=str(head))


@pytest.mark.parametrize(("name", "change", "words"), BAD_TENSORS)
def test_a_damaged_head_is_refused(model, tmp_path, unread, name: str, change, words: str) -> None:
    head = write_head(tmp_path / "head", model)
    weights = load_file(head / "model.safetensors")
    if change is None:
        del weights[name]
    else:
        weights[name] = change(weights.get(name)).contiguous()
    save_file(weights, head / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        build(model, speculation=str(head))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"speculation": "/no/such"},
            "is not one of suffix, mtp, off, and no folder of a draft head",
        ),
        ({"tp": 3}, "tp 3"),
    ],
)
def test_what_cannot_be_is_refused(model, head, options: dict, words: str) -> None:
    with pytest.raises((ModelError, EngineError), match=words):
        build(model, **{"speculation": str(head), **options})
