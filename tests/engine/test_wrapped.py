"""Decoders through transformers' own code: greedy output equals transformers on every path of an
engine, and with a file of ours beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_kit import build, check_baseline, finish, hand_off, held, running, stop, submit
from hooks_kit import fixture_of_installed_hooks  # noqa: F401
from paths_kit import prompt_of
from references import references
from test_families import (  # noqa: F401 - these run here, with the engines below
    CHUNK,
    CROWD,
    MAX_TOKENS,
    PAGES,
    Case,
    test_handed_off_and_resumed,
    test_whole_in_chunks_and_from_the_cache,
)
from test_model_logits import Runner
from tiny_models import write_tiny_model
from tiny_wrapped import PATHS, WRAPPED

from engine.model import load_model
from engine.model.wrapped.attention import Triple
from engine.model.wrapped.parts import Replaced
from engine.types import SamplingParams

OWN = {"num_pages": PAGES, "max_sequences": CROWD, "max_step_tokens": 2 * CHUNK}
WRAP = {"model_impl": "transformers"}
RANKED = ("llama", "arcee", "cohere", "nemotron", "olmo", "starcoder2")


@pytest.fixture(scope="module", params=PATHS)
def path(request, tmp_path_factory):
    own = WRAPPED[request.param]
    return write_tiny_model(tmp_path_factory.mktemp(request.param), **own)


@pytest.fixture(scope="module")
def case(path) -> Iterator[Case]:
    engines = build(path, **OWN, **WRAP), build(path, **OWN | {"max_step_tokens": CHUNK}, **WRAP)
    yield Case(*engines, references(path, whole=True))
    stop(*engines)


def test_a_crowd_is_preempted_and_choices_draw_as_one(case):
    with held(case.one):
        runs = [submit(case.one, prompt_of(20 + i), 60, ignore_eos=True) for i in range(CROWD)]
    finish(*runs)
    # A window's pages let few in at once.
    assert case.one.load().preemptions > 0 or len(case.one.pools) > 1
    for run in runs:
        case.answers.check(run, 60)
    prompt = prompt_of(37)
    handed = hand_off(case.other, case.one, prompt, MAX_TOKENS, choices=2, ignore_eos=True)
    want = case.answers(prompt, MAX_TOKENS, past_end=True).tokens
    assert handed.tokens == [want] * 2


def test_log_probabilities_and_drafts(case, path):
    prompt = prompt_of(40)
    plain = submit(case.one, prompt, 6, sampling=SamplingParams(temperature=0.0, top_logprobs=2),
                   prompt_logprobs=True, ignore_eos=True)  # fmt: skip
    finish(plain)
    with running(path, **OWN, **WRAP, speculation="suffix") as engine:
        for _ in range(2):
            run = submit(engine, prompt * 2, 24, ignore_eos=True)
            finish(run)
            case.answers.check(run, 24)
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


def test_fp8_weights_are_those_of_ours(path):
    """Rounded as natively, with a file of ours beside it."""
    kind = {"dtype": torch.float32, "device": torch.device("cpu"), "quantization": "fp8"}
    loaded = load_model(str(path), **kind, **WRAP)
    assert loaded.precision == "fp8 (rounded on load)"
    names = {type(each.method).__name__ for each in loaded.model.linears}
    assert names == {"Fp8Channels"}
    if loaded.config.architecture != "LlamaForCausalLM":
        return
    ids = prompt_of(40)
    ours = Runner(load_model(str(path), **kind, model_impl="native")).step([(0, ids)])[0]
    theirs = Runner(loaded).step([(0, ids)])[0]
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_parts_that_answer_as_ours_are_ours(path, caplog):
    caplog.set_level("INFO", logger="baton.engine")
    loaded = load_model(str(path), dtype=torch.float32, device=torch.device("cpu"), **WRAP)
    modules = [*loaded.model.modules()]
    norms = {type(each).__name__ for each in modules if "Norm" in type(each).__name__}
    assert norms == {"RmsNorm"}
    layers, dense = loaded.config.num_layers, "moe" not in loaded.config.architecture.lower()
    # Qwen3's heads have norms.
    for kind in (Replaced, Triple):
        assert sum(isinstance(each, kind) for each in modules) == layers * dense
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "RMSNorm are ours, as they answer alike" in told
    assert ("Attention are ours, as they answer alike" in told) == dense


@pytest.mark.parametrize(
    ("name", "options", "ours"),
    [
        ("olmo", {}, True),
        ("olmo", {"clip_qkv": 8.0}, False),
        ("phi", {}, True),
        ("cohere", {"tie_word_embeddings": True}, False),  # It rotates neighbours.
        ("diffllama", {}, False),
    ],
)
def test_attention_that_does_more_stays(name, options, ours, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, family=name, **options)
    loaded = load_model(str(path), dtype=torch.float32, device=torch.device("cpu"), **WRAP)
    assert any(isinstance(each, Triple) for each in loaded.model.modules()) == ours


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "fp8"},
        {"hooks": ("quest?sparse_tokens=256",)},
        {"kv_host_bytes": 1 << 22},
    ],
    ids=["fp8-kv", "hooks", "tiers"],
)
def test_options_of_pages_do_what_they_do_natively(options, tmp_path):
    path, found = write_tiny_model(tmp_path, tokenizer=False), []
    for impl in ("native", "transformers"):
        with running(path, model_impl=impl, num_pages=80, **options) as engine:
            run = submit(engine, prompt_of(500), 8, ignore_eos=True)
            finish(run)
        found.append(run.tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "name", ["vaultgemma", *(pytest.param(each, marks=pytest.mark.matrix) for each in RANKED)]
)
def test_two_ranks_by_the_plan_of_transformers(name, tmp_path):
    """They answer alike, and hand off to one rank."""
    path = write_tiny_model(tmp_path, tokenizer=False, **WRAPPED[name])
    answers = references(path, whole=True)
    two, one = build(path, tp=2, **OWN, **WRAP), build(path, **OWN, **WRAP)
    try:
        for prompt in (prompt_of(50), prompt_of(90)):
            runs = [submit(engine, prompt, MAX_TOKENS, ignore_eos=True) for engine in (one, two)]
            finish(*runs)
            for run in runs:
                answers.check(run, MAX_TOKENS)
        assert one.model.fingerprint == two.model.fingerprint
        check_baseline(two)
    finally:
        one.stop()
        two.stop()
