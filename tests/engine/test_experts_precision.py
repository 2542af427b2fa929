"""Models with experts in every precision of their checkpoints, against transformers with the same
rounding, on one rank and on several."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import build, finish, hand_off, stop, submit
from quantised_checkpoints import FORMS, INPUT_SCALE
from quantised_experts import reference_of, scaled, write_config, write_mxfp4
from quantised_folders import FLOAT_INPUT, write_quantised
from references import references
from safetensors.torch import load_file, save_file
from test_model_logits import Runner, load, reference
from tiny_families import EVERY, EXPERTS
from tiny_models import write_tiny_model

from engine.model import ModelError, UnsupportedModelError, load_model
from engine.model.config import ExpertsConfig, read_json
from engine.model.precision.choice import Precision
from engine.model.precision.formats import read_format
from engine.model.ranks import check_ranks
from engine.model.shard import Shard

SHAPE = {"hidden": 256, "heads": 4, "kv_heads": 2, "tokenizer": False}
WIDTHS = {
    "mixtral": {"head_dim": 64},
    "qwen2_moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256},
    "qwen3_moe": {"moe_intermediate_size": 128, "head_dim": 64},
    "deepseek_v3": {
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "v_head_dim": 32,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
    },
}
SCALES = {
    "lm_head.weight": 0.25,
    "_proj.weight": 0.5,
    ".w1.weight": 0.5,
    ".w2.weight": 0.5,
    ".w3.weight": 0.5,
}
QUICK = [("mixtral", "fp8-static"), ("deepseek_v3", "fp8-blocks"), ("qwen2_moe", "gptq")]
TOKENS = 40
LOGITS = 1e-4
PROMPTS, MOST_FLIPS = 12, 6
"""Prompts of four tokens, and how many of them may be off: float32 sums differ in their last bits,
so now and then an input rounds to the other neighbour, and a router may choose another expert."""


def cases() -> list[Any]:
    return [
        pytest.param(family, form, marks=() if (family, form) in QUICK else pytest.mark.matrix)
        for family in WIDTHS
        for form in FORMS
    ]


@pytest.fixture(scope="module")
def floats(tmp_path_factory) -> dict[str, Path]:
    class Folders(dict[str, Path]):
        def __missing__(self, family: str) -> Path:
            folder = tmp_path_factory.mktemp(family) / "float"
            write_tiny_model(folder, **(SHAPE | EVERY[family] | WIDTHS[family]))
            self[family] = scaled(folder, SCALES)
            return self[family]

    return Folders()


@pytest.mark.parametrize(("family", "form"), cases())
def test_logits_equal_transformers_that_rounds_alike(family, form, floats, tmp_path):
    source = floats[family]
    names = [name.removesuffix(".weight") for name in load_file(source / "model.safetensors")]
    scales = {name: INPUT_SCALE * (1 + zlib.crc32(name.encode()) % 100 / 100) for name in names}
    checkpoint = write_quantised(source, tmp_path, form, input_scales=scales)
    assert any("experts" in name for name in checkpoint.weights)
    prompts = np.random.default_rng(1).integers(1, 384, (PROMPTS, 4)).tolist()
    want = list(map(reference_of(source, family, form, checkpoint), prompts))
    found = Runner(load(tmp_path)).step(list(enumerate(prompts)))
    errors = [float((a - b).abs().max()) for a, b in zip(found, want, strict=True)]
    assert max(float(each.abs().max()) for each in want) > 1
    flips = 0 if form.startswith(FLOAT_INPUT) else MOST_FLIPS
    assert sum(error >= LOGITS for error in errors) <= flips, errors
    assert sorted(errors)[PROMPTS // 3] < LOGITS / 10


def test_a_bias_that_the_model_lacks_must_be_zero(floats, tmp_path):
    """Old versions of AutoGPTQ wrote biases of zeros. One that is not would be left out."""
    checkpoint = write_quantised(floats["mixtral"], tmp_path, "gptq")
    for dtype in (torch.float16, torch.float32):
        biases = {
            f"{module}.bias": torch.zeros(len(weight), dtype=dtype)
            for module, weight in checkpoint.weights.items()
            if module.endswith((".o_proj", ".w1", ".w2"))
        }
        assert len(biases) > 4
        save_file(checkpoint.tensors | biases, tmp_path / "model.safetensors")
        load(tmp_path)
        for name in (min(biases), max(biases)):
            for wrong in (1e-6, float("nan")):
                one = biases[name].clone()
                one[-1] = wrong
                tensors = checkpoint.tensors | biases | {name: one}
                save_file(tensors, tmp_path / "model.safetensors")
                with pytest.raises(UnsupportedModelError, match=f"^{name} is not zero"):
                    load(tmp_path)


# -- MXFP4 --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory) -> tuple[Path, Path]:
    """gpt-oss as it is published, and its weights as floats."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    source = write_tiny_model(folder / "source", tokenizer=False, **EVERY["gpt_oss"])
    write_mxfp4(source, folder / "mxfp4", folder / "floats")
    return folder / "mxfp4", folder / "floats"


def test_gpt_oss_in_mxfp4_on_every_path(mxfp4):
    path, same = mxfp4
    answers = references(same)
    one, other = (build(path, num_pages=40, max_step_tokens=tokens) for tokens in (128, 32))
    prompt = np.random.default_rng(2).integers(1, 384, 70).tolist()
    want = answers(prompt, 12, past_end=True)
    assert min(want.margins) > answers.noise
    for _ in range(2):
        runs = [submit(engine, prompt, 12, ignore_eos=True) for engine in (one, other)]
        finish(*runs)
        assert [run.tokens[0] for run in runs] == [want.tokens] * 2
    assert one.load().prompt_tokens_cached > 0
    run = hand_off(other, one, prompt[::-1], 12, ignore_eos=True)
    assert run.tokens[0] == answers(prompt[::-1], 12, past_end=True).tokens
    stop(one, other)


def test_what_mxfp4_cannot_be_is_refused(mxfp4, tmp_path):
    path, _ = mxfp4
    tensors = load_file(path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    name = "model.layers.1.mlp.experts.down_proj_scales"
    wrong = tensors[name].clone()
    wrong[1, 2, 0] = 255
    save_file(tensors | {name: wrong}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"{name} holds a scale"):
        load(tmp_path)
    save_file(
        tensors | {name: tensors[name][:, :, :1].contiguous()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelError, match=r"down_proj_scales has shape \[4, 64, 1\]"):
        load(tmp_path)
    blocks = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    for experts in (3, 5):
        some = tensors[blocks][[0, 1, 2, 3, 3][:experts]]
        save_file(tensors | {blocks: some}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=rf"gate_up_proj_blocks has shape \[{experts}, "):
            load(tmp_path)
    write_config(tmp_path, modules_to_not_convert=None)
    with pytest.raises(UnsupportedModelError, match="already, as mxfp4"):
        load(tmp_path, quantization="fp8")


# -- ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*EXPERTS, "mxfp4"])
def test_parts_of_ranks_are_slices_of_the_width(family, mxfp4, tmp_path):
    if family == "mxfp4":
        path = mxfp4[0]
    else:
        path = write_tiny_model(tmp_path, tokenizer=False, **EVERY[family])
    whole = load(path)
    ranks = [load(path, shard=Shard(rank, 2)) for rank in range(2)]
    assert {loaded.revision for loaded in ranks} == {whole.revision}
    layers = [loaded.model.layers[-1].feed_forward for loaded in (*ranks, whole)]
    assert isinstance(whole.config.layers[-1].feed_forward, ExpertsConfig)
    for expert in range(len(layers[0].down.methods)):
        *parts, one = [layer.down.methods[expert].weight for layer in layers]
        assert torch.equal(torch.cat(parts, 1), one)
        *both, one = [layer.gate_up.methods[expert].weight.chunk(2) for layer in layers]
        for half in range(2):
            assert torch.equal(torch.cat([each[half] for each in both]), one[half])
    if layers[0].down.bias is not None:
        assert torch.equal(layers[0].down.bias, layers[2].down.bias)
        assert not layers[1].down.bias.any(), "a bias is added once"
        halves = [layer.gate_up.bias.chunk(2, 1) for layer in layers]
        assert torch.equal(torch.cat([h[1] for h in halves[:2]], 1), halves[2][1])


def test_ranks_that_would_cut_a_block_are_refused(mxfp4):
    loaded = load(mxfp4[0])
    form = read_format(read_json(mxfp4[0] / "config.json"), mxfp4[0])
    precision = Precision(torch.device("cpu"), torch.float32, form)
    check_ranks(loaded.config, precision, Shard(0, 4))
    with pytest.raises(UnsupportedModelError, match=r"these fit: 1, 2, 4$"):
        check_ranks(loaded.config, precision, Shard(0, 8))


def test_bfloat16_is_near_float32(floats):
    ids = np.random.default_rng(3).integers(1, 384, TOKENS).tolist()
    want = reference(floats["qwen3_moe"], ids)
    found = Runner(load_bf16(floats["qwen3_moe"])).step([(0, ids)])[0]
    theirs = reference(floats["qwen3_moe"], ids, torch.bfloat16)
    assert (found - want).abs().mean() <= 1.5 * (theirs - want).abs().mean()


def load_bf16(path: Path) -> Any:
    return load_model(str(path), dtype=torch.bfloat16, device=torch.device("cpu"))
