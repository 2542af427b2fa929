"""Layers that fold tokens into a state: on every path of an engine, what one whole forward says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beams_kit import Searches
from beams_kit import check as check_beams
from engine_kit import (
    build,
    check_baseline,
    finish,
    hand_off,
    held,
    prefill_pages,
    running,
    stop,
    submit,
)
from quantised_folders import fp8_reference
from references import References, references
from test_model_logits import load
from tiny_families import HYBRIDS
from tiny_models import write_tiny_model

from engine.beams.params import BeamParams
from engine.groups.spec import State
from engine.groups.state import DECODED_TOKENS
from engine.model import ModelError
from engine.model.mixers import delta, mamba
from engine.parts.paging import EngineError
from engine.types import FailureReason, Mode

GRID, MAX_TOKENS = 64, 24
FLIP = 0.25
"""By how much inputs that are rounded the other way move the distance of two logits. A state keeps
what they have changed."""
ALL_LENGTHS = (1, 5, 63, 64, 65, 128, 129, 200, 300)
CASES = [
    pytest.param(
        family, length, marks=() if (family, length) == ("qwen3_5", 200) else pytest.mark.matrix
    )
    for family in HYBRIDS
    for length in ALL_LENGTHS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes the model of a family once."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            write_tiny_model(made[family], tokenizer=False, **HYBRIDS[family])
        return made[family]

    return of


@pytest.fixture(scope="module")
def engines(folder):
    """Two engines of a family: one computes prompts in larger pieces than the other."""
    made: dict[str, Any] = {}

    def of(family: str) -> Any:
        if family not in made:
            options: dict[str, Any] = {"max_sequences": 6, "poison_freed_pages": True}
            made[family] = [
                build(folder(family), max_step_tokens=tokens, **options) for tokens in (512, 90)
            ]
        return made[family]

    yield of
    for both in made.values():
        stop(*both)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(1000 * seed + length).integers(1, 384, length).tolist()


def check(path: Path, run, max_tokens: int = MAX_TOKENS, given: int = 0) -> None:
    references(path, whole=True).check(run, max_tokens, given)


def border(length: int) -> int:
    """Where a prompt of so many tokens is gone on from."""
    return (length - 1) // GRID * GRID


@pytest.mark.parametrize(("family", "length"), CASES)
def test_whole_in_chunks_cached_forked_resumed_and_handed_off(engines, folder, family, length):
    path, (one, other) = folder(family), engines(family)
    assert [spec.kind for spec in one.pools.specs[1:]] == [State(GRID)]
    for engine in (one, other):
        for choices in (1, 1, 3):
            before = engine.load().prompt_tokens_cached
            run = submit(engine, prompt_of(length), MAX_TOKENS, choices=choices, ignore_eos=True)
            finish(run)
            check(path, run)
        assert engine.load().prompt_tokens_cached - before == border(length)
    run = hand_off(other, one, prompt_of(length, 1), MAX_TOKENS, choices=2, ignore_eos=True)
    check(path, run)
    given = run.tokens[0][:7]
    run = submit(one, prompt_of(length, 1), MAX_TOKENS, generated=[given], ignore_eos=True)
    finish(run)
    check(path, run, given=7)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_5", {"num_pages": 40}),
        ("qwen3_5", {"num_pages": 40, "speculation": "suffix"}),
        *(
            pytest.param(family, options, marks=pytest.mark.matrix)
            for family in ("qwen3_5", "granite4", "granite4_experts", "nemotron_h_experts")
            for options in (
                {"num_pages": 40, "kv_host_bytes": 1 << 22},
                {"tp": 2},
                {"tp": 2, "num_pages": 40, "kv_host_bytes": 1 << 22},
                {"kv_cache_dtype": "fp8"},
            )
        ),
    ],
)
def test_preempted_swapped_and_of_two_ranks(family, options, folder):
    path = folder(family)
    with running(path, max_sequences=6, max_step_tokens=128, **options) as engine:
        with held(engine):
            runs = [submit(engine, prompt_of(60 + i), 80, ignore_eos=True) for i in range(6)]
        finish(*runs)
        assert (engine.load().preemptions > 0) is ("num_pages" in options)
        for run in runs:
            if "kv_cache_dtype" not in options:
                check(path, run, 80)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3_5", "granite4"])
def test_beams_share_states(family, folder):
    """What transformers finds without a cache; with hardly more pages than beams."""
    path, params = folder(family), BeamParams(4)
    searches = Searches(path)
    with running(path, max_sequences=5, max_step_tokens=128, num_pages=100) as engine:
        for length in (5, 64, 130):
            for _ in range(2):
                run = submit(engine, prompt_of(length), 12, beams=params, ignore_eos=True)
                finish(run)
                check_beams(run, searches.find(prompt_of(length), params, 12, ()))


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3_5", "granite4", "nemotron_h"])
def test_weights_in_fp8(family, folder):
    """Tokens of transformers with the same rounding; the state is float32 all the same."""
    path = folder(family)
    load = lambda: fp8_reference(path).model  # noqa: E731
    answers = References(path, "fp8", load, FLIP, whole=True)
    one, other = (build(path, max_step_tokens=n, quantization="fp8") for n in (512, 80))
    for length in (5, 130):
        for engine in (one, one, other):
            run = submit(engine, prompt_of(length), 8, ignore_eos=True)
            finish(run)
            answers.check(run, 8)
        answers.check(hand_off(other, one, prompt_of(length), 8, ignore_eos=True), 8)
    for engine in (one, other):
        assert engine.pools[1].precision == "float32"
        stop(engine)


def states_of(engine, prompt: list[int], length: int) -> tuple[torch.Tensor, ...]:
    """Bytes of the state behind a prompt, and of the one that is kept of it."""
    run = submit(engine, prompt, 1, mode=Mode.PREFILL)
    finish(run)
    _, kept = prefill_pages(engine, run)
    pool = engine.pools[1]
    found = [pool.data[kept.pages[0]].clone()]
    engine.release(run.request.id)
    check_baseline(engine)
    scheduler = engine._loop._scheduler
    (group,) = scheduler.others.groups
    found += [pool.data[page].clone() for page in sorted(group.blocks._key_of)]
    return tuple(found)


def test_pieces_of_a_prompt_leave_the_state_of_the_whole_bit_by_bit(folder):
    """Also where a part of it is cached: the second time each goes on behind its last border. (Of
    products with experts even the model's own numbers depend on how many tokens there are.)"""
    path, prompt, found = folder("qwen3_5"), prompt_of(331), []
    for tokens in (512, 90):
        with running(path, max_sequences=6, max_step_tokens=tokens, num_pages=60) as engine:
            found += [states_of(engine, prompt, 331) for _ in range(2)]
            assert engine.load().prompt_tokens_cached == border(331)
    for other in found[1:]:
        assert len(other) == 2
        for state, same in zip(found[0], other, strict=True):
            assert torch.equal(state, same)


def test_a_prompt_that_begins_alike_goes_on_where_it_parts(engines, folder):
    """Its own last place is further on: only the second one of such prompts leaves a state where
    they part."""
    path, (engine, _) = folder("qwen3_5"), engines("qwen3_5")
    alike, cached, missed = prompt_of(150, 5), [], []
    for seed in (6, 7, 8):
        before = engine.load()
        run = submit(engine, alike + prompt_of(100, seed), MAX_TOKENS, ignore_eos=True)
        finish(run)
        check(path, run)
        after = engine.load()
        cached.append(after.prompt_tokens_cached - before.prompt_tokens_cached)
        missed.append(after.prompt_tokens_unresumable - before.prompt_tokens_unresumable)
    assert cached == [0, 0, 128]
    assert missed == [0, 144, 16]


def test_the_next_turn_goes_on_from_what_decoding_left(engines):
    engine, _ = engines("qwen3_5")
    prompt = prompt_of(DECODED_TOKENS - 40, 3)
    run = submit(engine, prompt, 60, ignore_eos=True)
    finish(run)
    before = engine.load().prompt_tokens_cached
    turn = submit(engine, prompt + run.tokens[0] + prompt_of(20, 4), 8, ignore_eos=True)
    finish(turn)
    assert engine.load().prompt_tokens_cached - before == DECODED_TOKENS


def spoil(engine) -> None:
    """All states are of one token more than they are said to be of."""
    pool = engine.pools[1]
    for layer in range(pool.num_layers):
        pool.stamps(layer).add_(1)


def test_a_stale_state_fails_its_request_and_no_other(folder):
    engine, prompt = build(folder("qwen3_5"), max_sequences=6), prompt_of(200)
    first = submit(engine, prompt, 1, mode=Mode.PREFILL, ignore_eos=True)
    run = submit(engine, prompt, 20, mode=Mode.RECEIVE, ignore_eos=True)
    finish(first, run)
    spoil(engine)
    engine.deliver(run.request.id, first.prefilled.records)
    assert run.done.wait(60)
    assert run.failed is not None
    assert run.failed.reason is FailureReason.NUMERICAL
    engine.release(first.request.id)
    again = submit(engine, prompt, 20, ignore_eos=True)
    finish(again)
    check(folder("qwen3_5"), again, 20)
    stop(engine)


@pytest.mark.parametrize("tier", [False, True])
def test_a_stale_state_in_the_cache_is_dropped_and_its_prompts_computed_again(tier, folder):
    """Several go on from it at once, one of them for another worker. So they do from its copy in
    host memory."""
    path, prompt = folder("qwen3_5"), prompt_of(200)
    options = {"kv_host_bytes": 1 << 22} if tier else {}
    with running(path, max_sequences=9, num_pages=80, **options) as engine:
        finish(submit(engine, prompt, 2, ignore_eos=True))
        spoil(engine)
        if tier:
            for seed in range(20, 36):
                finish(submit(engine, prompt_of(200, seed), 2, ignore_eos=True))
        for again in (6, 0):
            before = engine.load()
            with held(engine):
                first = submit(engine, prompt, mode=Mode.PREFILL, ignore_eos=True)
                runs = [
                    submit(engine, prompt, MAX_TOKENS, choices=n, ignore_eos=True)
                    for n in (1, 3, 1)
                ]
            finish(first, *runs)
            for run in runs:
                check(path, run)
            assert first.prefilled.records[0].token_id == runs[0].tokens[0][0]
            engine.release(first.request.id)
            after = engine.load()
            assert after.preemptions - before.preemptions == again
            if tier and again:
                assert sum(after.prompt_tokens_loaded.values()) > 0


@pytest.mark.parametrize("rule", ["delta", "scan"])
def test_blocks_fold_what_single_tokens_fold(rule):
    """Against the rule as it is written down, token by token, in float64."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(130, 2, 1, 8), dim=-1) for _ in range(2))
    v, beta = torch.randn(130, 2, 3, 4), torch.rand(130, 2, 3)
    log_decay, state = -torch.rand(130, 2, 3) / 10, torch.randn(2, 3, 8, 4)
    if rule == "delta":
        out, after = delta.fold(q, k, v, log_decay, beta, state)
    else:
        out, after = mamba.fold(q, k, v, log_decay, state)
    want = state.double()
    for at in range(130):
        want = want * log_decay[at].double().exp()[..., None, None]
        key, change = k[at].double().expand(2, 3, 8), v[at].double()
        if rule == "delta":
            found = torch.einsum("urk,urkv->urv", key, want)
            change = (change - found) * beta[at][..., None]
        want = want + key[..., None] * change[..., None, :]
        read = torch.einsum("urk,urkv->urv", q[at].double().expand(2, 3, 8), want)
        torch.testing.assert_close(out[at].double(), read, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(after.double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"linear_num_value_heads": 3}, "3 linear value heads do not share 2 key heads"),
        ({"linear_num_key_heads": 0}, "Qwen3_5ForCausalLM"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim is 9; it can be 2 to 8"),
        ({"linear_key_head_dim": 2048}, "width of a linear key head is 2048; it can be 1 to 1024"),
        ({"hidden_act": "gelu"}, "linear attention with the activation gelu"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types are linear_attention, 3 in all"),
    ],
)
def test_what_cannot_be_is_named_before_weights_are_read(changes, words, folder, tmp_path):
    check_named("qwen3_5", changes, words, folder, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers_block_type": ["mamba", "mlp"]}, "and of the first two at least one each"),
        ({"layers_block_type": ["mamba", "attention", "conv"]}, "NemotronHForCausalLM"),
        ({"layers_block_type": ["mamba", "attention"] * 513}, "1026 in all"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act silu is not supported; relu2 is"),
        ({"moe_latent_size": 0}, "experts read 0 numbers"),
        ({"mlp_bias": True}, "mlp_bias beside moe_latent_size"),
        ({"n_groups": 3}, "8 Mamba heads do not make 3 groups"),
    ],
)
def test_what_nemotron_cannot_be_is_named(changes, words, folder, tmp_path):
    check_named("nemotron_h_experts", changes, words, folder, tmp_path)


def check_named(family, changes, words, folder, tmp_path):
    config = json.loads((folder(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_step_tokens": 79}, "max_sequences 16 plus 64: prompts of this model are cut"),
        ({"mixed_prefill_tokens": 32}, "mixed_prefill_tokens 32 must be at least 64"),
        ({"tp": 4}, "it does not divide the 2 key heads of a linear attention"),
    ],
)
def test_what_does_not_go_with_states_is_named(options, words, folder):
    with pytest.raises((EngineError, ModelError), match=words):
        build(folder("qwen3_5"), **options)
