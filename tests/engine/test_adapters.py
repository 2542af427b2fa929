"""Adapters beside a model: output equals peft over transformers, alone, mixed in a batch, and on
every path of a request. Pages of one adapter are found by no other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adapters_kit import EVERY, adapted, answers, write_adapter
from engine_kit import build, check_baseline, finish, hand_off, held, submit
from heads_kit import write_head
from paths_kit import prompt_of
from quantised_checkpoints import Checkpoint
from quantised_experts import write_mxfp4
from quantised_folders import write, write_quantised
from references import references
from safetensors.torch import load_file
from test_model_logits import Runner
from tiny_families import BY_LAYER, DENSE, EXPERTS, HYBRIDS, LATENTS
from tiny_models import write_tiny_model

from engine.adapters.slots import NO_SLOT
from engine.adapters.types import AdapterError
from engine.model import load_model
from engine.model.adapters.reading import Limits, read_adapter
from engine.model.adapters.sites import AdapterSites, linears_of, shapes_of
from engine.types import FailureReason, SamplingParams

LIMITS = Limits(most_rank=256, most_bytes=1 << 30)
KINDS = {
    "every": {},
    "q-v": {"target_modules": ["q_proj", "v_proj"]},
    "one-expression": {"target_modules": r".*\.layers\.\d+\.mlp\.(up|down)_proj"},
    "all-linear": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "rslora": {"use_rslora": True, "r": 4},
    "patterns": {
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 16},
        "alpha_pattern": {"down_proj": 3},
    },
    "some-layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "wide": {"r": 256, "lora_alpha": 64},
}
FAMILIES = {
    "phi3": (
        DENSE["phi3"],
        {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    ),
    "qwen3": ({"family": "qwen3", "head_dim": 32}, {}),
    "gemma3": (DENSE["gemma3"], {}),
}
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
ENGINES = {
    "deepseek_v3": (LATENTS["deepseek_v3"], LATENT, "kv_b_proj"),
    "qwen3_5_moe": (HYBRIDS["qwen3_5_moe"], EVERY[:4], "in_proj_qkv"),
    "lfm2": (BY_LAYER["lfm2"], ["q_proj", "v_proj", "w1", "w2"], "in_proj"),
    "gpt_oss": (EXPERTS["gpt_oss"], EVERY[:4], ""),
    "shared-experts": (
        HYBRIDS["qwen3_5_moe"],
        r".*(shared_expert\.(gate|up|down)_proj|self_attn\.o_proj)",
        "shared_expert_gate",
    ),
}
"""Models, products that have pairs there, around latents and states, and one that cannot."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def three(path, tmp_path_factory):
    """Folders of three adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    kinds = ({}, {"r": 16, "target_modules": ["q_proj", "v_proj"]}, {"r": 2, "use_rslora": True})
    return [write_adapter(path, folder / str(i), i, **kind) for i, kind in enumerate(kinds)]


def engine_with(path, folders, **options):
    named = tuple(f"a{i}={folder}" for i, folder in enumerate(folders))
    return build(path, max_adapters=2, max_adapter_rank=256, adapters=named, **options)


def digests(engine) -> list[bytes]:
    return [info.digest for info in engine.adapters.named()]


def logits(path, folder, ids: list[int], impl: str = "auto") -> torch.Tensor:
    loaded = load_model(str(path), dtype=torch.float32, device=torch.device("cpu"), model_impl=impl)
    adapter = read_adapter(folder, shapes_of(linears_of(loaded.model)), LIMITS, torch.float32)
    sites = AdapterSites(loaded.model)
    whole = np.array([len(ids)], np.int32)
    sites.begin(((0, adapter),), np.array([0], np.int32), whole)
    return Runner(loaded).step([(0, ids)])[0]


def check_logits(path, folder, impl: str = "auto") -> None:
    """Beside peft's, and beside those of weights to which the pairs were added."""
    ids = prompt_of(40)
    found = logits(path, folder, ids, impl)
    with torch.inference_mode():
        for merged in (False, True):
            want = adapted(path, folder, merged=merged)(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
        base = Runner(load_model(str(path), dtype=torch.float32, device=torch.device("cpu")))
        assert (found - base.step([(0, ids)])[0]).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_peft(kind, path, tmp_path):
    check_logits(path, write_adapter(path, tmp_path, **KINDS[kind]))


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_other_families(name, impl, tmp_path):
    own, kind = FAMILIES[name]
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **own)
    check_logits(path, write_adapter(path, tmp_path / "adapter", **kind), impl)


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_of_latents_states_and_mixtures(name, tmp_path):
    """Beside what has no pairs there: it is refused by its name."""
    own, targets, refused = ENGINES[name]
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **own)
    folder = write_adapter(path, tmp_path / "adapter", target_modules=targets)
    engine = engine_with(path, [folder], num_pages=60)
    try:
        for length in (20, 70):
            run = submit(engine, prompt_of(length), 12, adapter=digests(engine)[0], ignore_eos=True)
            finish(run)
            answers(path, folder).check(run, 12)
        check_baseline(engine)
        if refused:
            other = write_adapter(path, tmp_path / "other", target_modules=[refused])
            with pytest.raises(AdapterError, match=rf"{refused} can have no pair here: products"):
                engine.adapters.load("other", other)
    finally:
        engine.stop()


@pytest.mark.parametrize("form", ["mxfp4", "pack-quantized-group"])
def test_quantised_bases(form, tmp_path):
    """Weights that are widened: tokens are those of peft over what they stand for."""
    made, floats = tmp_path / "made", tmp_path / "floats"
    own = EXPERTS["gpt_oss"] if form == "mxfp4" else {"hidden": 128}
    source = write_tiny_model(tmp_path / "source", tokenizer=False, **own)
    if form == "mxfp4":
        write_mxfp4(source, made, floats)
    else:
        weights = write_quantised(source, made, form).weights
        tensors = load_file(source / "model.safetensors")
        tensors |= {f"{name}.weight": weight.float() for name, weight in weights.items()}
        write(source, floats, Checkpoint(tensors, None))
    folder = write_adapter(floats, tmp_path / "adapter", target_modules=EVERY[:4])
    engine = engine_with(made, [folder], num_pages=60)
    try:
        runs = [
            submit(engine, prompt_of(70), 12, adapter=digest, ignore_eos=True)
            for digest in (*digests(engine), b"")
        ]
        finish(*runs)
        answers(floats, folder).check(runs[0], 12)
        references(floats).check(runs[1], 12)
        check_baseline(engine)
    finally:
        engine.stop()


def test_whole_chunked_cached_handed_off_and_preempted(path, three):
    one = engine_with(path, three[:1], num_pages=24, max_sequences=4, max_step_tokens=32)
    other = engine_with(path, three[:1])
    adapter, want = digests(one)[0], answers(path, three[0])
    try:
        prompt = prompt_of(70)
        for _ in range(2):
            run = submit(one, prompt, 12, adapter=adapter, ignore_eos=True)
            finish(run)
            want.check(run, 12)
        assert one.load().prompt_tokens_cached > 0
        run = hand_off(one, other, prompt[:45], 12, adapter=adapter, ignore_eos=True)
        want.check(run, 12)
        with held(one):
            runs = [
                submit(one, prompt_of(20 + i), 80, adapter=adapter, ignore_eos=True)
                for i in range(4)
            ]
        finish(*runs)
        assert one.load().preemptions > 0
        for run in runs:
            want.check(run, 80)
        for engine in (one, other):
            check_baseline(engine)
            assert engine.adapters.held == 0
    finally:
        one.stop()
        other.stop()


def test_a_mixed_batch_answers_as_each_alone(path, three):
    """Three adapters for two slots, the model alone, seeds and choices, in one crowd."""
    engine, base = engine_with(path, three), references(path)
    own = digests(engine)
    try:
        want = [answers(path, folder) for folder in three]
        with held(engine):
            greedy = [
                (which, submit(engine, prompt_of(30 + i), 12, adapter=digest, ignore_eos=True))
                for i in range(2)
                for which, digest in enumerate([*own, b""])
            ]
            drawn = {"sampling": SamplingParams(temperature=1.0, seed=7), "choices": 2}
            sampled = submit(engine, prompt_of(33), 12, adapter=own[0], **drawn, ignore_eos=True)
        finish(sampled, *(run for _, run in greedy))
        for which, run in greedy:
            ([*want, base][which]).check(run, 12)
        again = submit(engine, prompt_of(33), 12, adapter=own[0], **drawn, ignore_eos=True)
        finish(again)
        assert again.tokens == sampled.tokens
        check_baseline(engine)
    finally:
        engine.stop()


def test_pages_are_found_by_their_own_adapter_alone(path, three):
    engine = engine_with(path, three[:2])
    own = [*digests(engine), b""]
    try:
        prompt = prompt_of(64)
        for adapter in own:
            for turn in range(2):
                before = engine.load().prompt_tokens_cached
                finish(submit(engine, prompt, 2, adapter=adapter, ignore_eos=True))
                assert (engine.load().prompt_tokens_cached > before) == (turn == 1)
        check_baseline(engine)
    finally:
        engine.stop()


def test_a_name_that_means_another_content(path, three):
    """A run under way ends on what it began with, and what comes finds none of its pages."""
    engine = engine_with(path, three[:1])
    before = digests(engine)[0]
    try:
        want = answers(path, three[0])
        run = submit(engine, prompt_of(40), 60, adapter=before, ignore_eos=True)
        with pytest.raises(AdapterError, match="taken by another adapter"):
            engine.adapters.load("a0", three[1])
        info = engine.adapters.load("a0", three[1], again=True)
        assert info.digest != before
        finish(run)
        want.check(run, 60)
        cached = engine.load().prompt_tokens_cached
        other = submit(engine, prompt_of(40), 12, adapter=info.digest, ignore_eos=True)
        finish(other)
        answers(path, three[1]).check(other, 12)
        assert engine.load().prompt_tokens_cached == cached
        gone = submit(engine, prompt_of(40), 12, adapter=before)
        assert gone.done.wait(30)
        assert gone.failed is not None
        assert gone.failed.reason is FailureReason.ADAPTER
        assert engine.adapters.unload("a0")
        assert not engine.adapters.unload("a0")
        check_baseline(engine)
    finally:
        engine.stop()


@torch.inference_mode()
def prompt_and_few(path, folder, prompt, few, count) -> list[int]:
    """A prompt and peft's greedy answer of few tokens."""
    model, ids = adapted(path, folder), list(prompt)
    for _ in range(count):
        scores = model(torch.tensor([ids])).logits[0, -1]
        ids.append(max(few, key=lambda token: float(scores[token])))
    return ids


@pytest.mark.parametrize("drafter", ["suffix", "head"])
def test_drafts_of_rows_with_adapters(path, three, drafter, tmp_path):
    """A head drafts for the model as it is: its drafts are worse, and no token changes."""
    if drafter == "head":
        drafter = str(write_head(tmp_path, path, "speculators", taps=(0, 1, 2)))
    engine = engine_with(path, three[:2], speculation=drafter)
    try:
        for which, adapter in enumerate(digests(engine)):
            drafted = engine.load().speculation.drafted_tokens
            prompt, few = (
                prompt_of(40) * 2,
                (5, 9, 11),
            )  # Answers of three tokens repeat themselves.
            sampling = SamplingParams(temperature=0.0, allowed_token_ids=few)
            run = submit(engine, prompt, 24, adapter=adapter, ignore_eos=True, sampling=sampling)
            finish(run)
            assert run.tokens == [prompt_and_few(path, three[which], prompt, few, 24)[80:]]
            for _ in range(2):
                run = submit(engine, prompt_of(40) * 2, 24, adapter=adapter, ignore_eos=True)
                finish(run)
                answers(path, three[which]).check(run, 24)
            assert engine.load().speculation.drafted_tokens > drafted
        assert engine.load().speculation.accepted_tokens > 0 or drafter != "suffix"
        check_baseline(engine)
    finally:
        engine.stop()


def test_rows_without_leave_the_product_alone(path, three):
    loaded = load_model(str(path), dtype=torch.float32, device=torch.device("cpu"))
    sites = AdapterSites(loaded.model)
    assert set(shapes_of(linears_of(loaded.model))) == {
        f"model.layers.{layer}.{part}.{name}"
        for layer in range(2)
        for name in EVERY
        for part in (["mlp"] if name in EVERY[4:] else ["self_attn"])
    }
    want = Runner(load_model(str(path), dtype=torch.float32, device=torch.device("cpu")))
    sites.begin((), np.array([NO_SLOT], np.int32), np.array([20], np.int32))
    ids = prompt_of(20)
    assert torch.equal(Runner(loaded).step([(0, ids)])[0], want.step([(0, ids)])[0])
