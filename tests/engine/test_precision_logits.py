"""Logits of quantised weights against transformers with the same rounding hooked in, for every
family and form, and how many rounded inputs flip. See `precision_reference`."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from precision_reference import MOST_FLIPS, TIE, Flips, Reference, modules_of, watch
from quantised_checkpoints import FORMS, INPUT_SCALE
from quantised_folders import fp8_reference, reference_of, rule_of, write_quantised
from safetensors.torch import load_file, save_file
from test_model_logits import Runner, load
from tiny_families import DENSE
from tiny_models import write_tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"family": "mistral", "sliding_window": 24},
    "qwen2": {"family": "qwen2", "use_sliding_window": False},
    "qwen3": {"family": "qwen3", "head_dim": 64},
    **{name: {**options, "head_dim": 64} for name, options in DENSE.items()},
}
FAMILIES["granite"]["logits_scaling"] = 1.0
SHAPE = {"hidden": 256, "heads": 4, "kv_heads": 2, "tokenizer": False}
"""All projections are multiples of 128."""
SCALES = {"_proj.weight": 0.5, "lm_head.weight": 0.125}
"""What weights are multiplied by, which otherwise suit a hidden size of 64. Logits reach 2, whose
last bit in float32 is 1e-7, and attention makes no more of small differences than it does there."""
LOGITS = 1e-5
"""How far a logit may be off, if they reach 2; Gemma's reach more."""
UNROUNDED_LOGITS = 3e-5
"""The same where inputs stay floats. Float32 sums differ in their last bits from processor to
processor. Rounding to e4m3 drops that at each product; without it the differences of all layers add
up. Up to 1.4e-5 was seen."""
CHUNKS = ((0, 16), (16, 35), (35, 90))
TOKENS = 96
ONLINE = 'quantization="fp8"'
SECONDS = [("llama", ONLINE), ("qwen2", "fp8-static"), ("llama", "fp8-blocks"), ("qwen3", "gptq")]
"""What `make test` runs, beside the matrix."""


def cases() -> list[Any]:
    every = [(family, form) for family in FAMILIES for form in (ONLINE, *FORMS)]
    return [
        pytest.param(*case, marks=() if case in SECONDS else pytest.mark.matrix) for case in every
    ]


@pytest.fixture(scope="module")
def floats(tmp_path_factory) -> dict[str, Path]:
    """Folders of float models, by family, as they are asked for."""

    class Folders(dict[str, Path]):
        def __missing__(self, family: str) -> Path:
            folder = tmp_path_factory.mktemp(family) / "float"
            self[family] = shrink(write_tiny_model(folder, **SHAPE, **FAMILIES[family]))
            return self[family]

    return Folders()


def shrink(folder: Path) -> Path:
    """Multiplies a model's weights by `SCALES`."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        for end, factor in SCALES.items():
            if name.endswith(end):
                tensor *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def scales_of(module: str) -> float:
    """Scales of inputs differ from module to module: the largest of a fused product counts."""
    return INPUT_SCALE * (1 + zlib.crc32(module.encode()) % 100 / 100)


@pytest.mark.parametrize(("family", "form"), cases())
def test_logits_equal_transformers_that_rounds_alike(family, form, floats, tmp_path):
    """Whole, then in chunks and token by token: inputs are rounded alike at every batch size."""
    source = floats[family]
    loaded, reference, rounds = build(source, form, tmp_path)
    ids = np.random.default_rng(1).integers(1, 384, TOKENS).tolist()
    for steps in ([(0, TOKENS)], [*CHUNKS, *((at, at + 1) for at in range(90, TOKENS))]):
        with watch(loaded.model) as inputs:
            runner = Runner(loaded)
            found = torch.cat([runner.step([(0, ids[a:b])])[0] for a, b in steps])
        assert set(inputs) == rounds
        want = reference.logits(ids, inputs)
        check(found, want, reference.flips, LOGITS if rounds else UNROUNDED_LOGITS)


def build(source: Path, form: str, folder: Path) -> tuple[Any, Reference, set[str]]:
    """An engine's model, its reference, and the modules whose inputs are rounded."""
    if form == ONLINE:
        loaded = load(source, quantization="fp8")
        return loaded, fp8_reference(source), set(modules_of(loaded.model))
    modules = modules_of(load(source).model)
    scales = {module: scales_of(module) for module in modules}
    checkpoint = write_quantised(source, folder, form, input_scales=scales)
    rule = rule_of(form, checkpoint)
    rounds = {module for module in modules if rule(module) is not None}
    return load(folder), reference_of(source, form, checkpoint), rounds


def check(found: torch.Tensor, want: torch.Tensor, flips: Flips, bound: float = LOGITS) -> None:
    largest = float(want.abs().max())
    error = float((found - want).abs().max())
    print(f"\nlogits up to {largest:.1f}, {error:.1e} off; {flips}")
    assert largest > 1
    assert error < bound * max(1.0, largest / 2)
    assert flips.missing == []
    assert flips.share <= MOST_FLIPS
    assert flips.worst < TIE
