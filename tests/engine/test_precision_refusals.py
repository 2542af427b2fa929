"""Settings and checkpoints of a precision that do not fit: what is refused, what is widened, what
workers compare, and how much memory is counted."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from precision_reference import Reference, Rule, watch
from quantised_checkpoints import FORMS, quantised
from quantised_folders import write, write_quantised
from safetensors.torch import load_file
from test_model_logits import Runner, load
from test_precision_logits import SHAPE, check, shrink
from tiny_models import write_tiny_model

from engine import memory
from engine.checkpoints import Weights, weights_of
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model import ModelError, UnsupportedModelError
from engine.model.loading import load_model
from engine.model.precision.dense import Dense
from engine.model.sources import Safetensors

PREFIX = "model.layers.0.self_attn."
QKV = [f"{PREFIX}{name}_proj" for name in "kqv"]
FEWER_KV = {**SHAPE, "kv_heads": 1, "head_dim": 64}
"""Rows of K and V that are half a block."""
CPU = torch.device("cpu")
COUNTED = 0.1
"""By how much a count from headers may be off for so small a model: GPTQ's g_idx, which has a word
for each input, counts as packed weights."""


def mostly_slow(every: Iterable[str], *quick: str) -> list[Any]:
    return [pytest.param(each, marks=() if each in quick else pytest.mark.matrix) for each in every]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return shrink(write_tiny_model(tmp_path_factory.mktemp("tiny") / "float", **SHAPE))


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the tensors that were read."""
    names: list[str] = []
    read = Safetensors.read

    def note(self, name):
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(Safetensors, "read", note)
    return names


# -- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["modelopt-fp8", "awq"])
def test_quantization_of_a_quantised_checkpoint_is_refused(form, source, tmp_path, reads):
    write_quantised(source, tmp_path, form)
    with pytest.raises(UnsupportedModelError, match=r"quantised already, as .*; leave the setting"):
        load(tmp_path, quantization="fp8")
    assert reads == []
    load(tmp_path)
    assert reads


@pytest.mark.parametrize("name", ["int4", "FP8", "fp8 "])
def test_an_unknown_quantization_is_refused_and_told_what_is_known(name, source, reads):
    with pytest.raises(UnsupportedModelError, match=f"'{name}' is unknown; known: fp8"):
        load(source, quantization=name)
    assert reads == []


def test_a_gpu_without_fp8_is_refused_before_anything_is_read(source, reads, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UnsupportedModelError, match=r"8\.9 or more .*; this one has 8\.0"):
        load_model(
            str(source),
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
            quantization="fp8",
            check=lambda _: None,
        )
    assert reads == []


# -- tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("fp8-static", "input_scale"),
        ("awq", "scales"),
        *(
            pytest.param(*each, marks=pytest.mark.matrix)
            for each in (
                ("fp8-dynamic", "weight_scale"),
                ("fp8-blocks", "weight_scale_inv"),
                ("compressed-tensors-channel-dynamic", "weight_scale"),
                ("pack-quantized-group", "weight_scale"),
                ("pack-quantized-asym", "weight_zero_point"),
                ("gptq", "qzeros"),
            )
        ),
    ],
)
def test_what_is_missing_or_misshapen_is_refused_before_anything_is_read(
    form, name, source, tmp_path, reads
):
    tensor = f"model.layers.1.mlp.down_proj.{name}"
    checkpoint = quantised(load_file(source / "model.safetensors"), form)
    whole = checkpoint.tensors.pop(tensor)
    write(source, tmp_path, checkpoint)
    with pytest.raises(ModelError, match=rf"1 tensors missing \({tensor}\)"):
        load(tmp_path)
    checkpoint.tensors[tensor] = whole.new_ones((3, 5))
    write(source, tmp_path, checkpoint)
    with pytest.raises(ModelError, match=rf"{tensor} has shape \[3, 5\], the config says"):
        load(tmp_path)
    assert reads == []
    checkpoint.tensors[tensor] = whole.to(torch.float64)
    write(source, tmp_path, checkpoint)
    with pytest.raises(UnsupportedModelError, match=rf"{tensor} is torch.float64; this model has"):
        load(tmp_path)
    assert reads == []


def test_a_float_tensor_where_the_description_says_quantised_is_refused(source, tmp_path, reads):
    checkpoint = quantised(load_file(source / "model.safetensors"), "fp8-dynamic")
    name = f"{QKV[0]}.weight"
    checkpoint.tensors[name] = checkpoint.tensors[name].to(torch.bfloat16)
    write(source, tmp_path, checkpoint)
    with pytest.raises(UnsupportedModelError, match=rf"{name} is torch.bfloat16; .*e4m3fn"):
        load(tmp_path)
    assert reads == []


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_scale_is_refused_by_name(bad, source, tmp_path):
    checkpoint = quantised(load_file(source / "model.safetensors"), "fp8-dynamic")
    checkpoint.tensors[f"{QKV[1]}.weight_scale"].fill_(bad)
    write(source, tmp_path, checkpoint)
    with pytest.raises(ModelError, match=rf"{QKV[1]}\.weight_scale .*not finite or not positive"):
        load(tmp_path)


# -- widened ------------------------------------------------------------------------------------


def widened(caplog) -> dict[str, list[str]]:
    """Modules by reason, as the log names them."""
    return {
        record.getMessage(): record.modules  # type: ignore[attr-defined]
        for record in caplog.records
        if record.levelno == logging.WARNING and "widened" in record.getMessage()
    }


def test_a_shape_that_no_product_takes_is_widened_and_named(tmp_path, caplog):
    source = write_tiny_model(tmp_path / "float", **FEWER_KV)
    write_quantised(source, tmp_path / "blocks", "fp8-blocks")
    loaded = load(tmp_path / "blocks")
    every = sorted(name.replace(".0.", f".{layer}.") for layer in (0, 1) for name in QKV)
    reason = "widened to the model's dtype: its shape is no multiple of 128"
    assert widened(caplog) == {reason: every}
    kinds = [type(linear.method) is Dense for linear in loaded.model.linears]
    assert kinds == [True, False, False, False] * 2


def test_a_float_input_is_widened_and_named(source, tmp_path, caplog):
    write_quantised(source, tmp_path, "compressed-tensors-float-input")
    loaded = load(tmp_path)
    ((reason, modules),) = widened(caplog).items()
    assert "its input is not rounded" in reason
    assert len(modules) == 14
    assert all(type(linear.method) is Dense for linear in loaded.model.linears)


def test_nothing_is_said_where_nothing_is_widened(source, tmp_path, caplog):
    write_quantised(source, tmp_path, "fp8-static")
    load(tmp_path)
    load(source, quantization="fp8")
    assert widened(caplog) == {}


@pytest.mark.parametrize("form", mostly_slow(("fp8-dynamic", "fp8-blocks", "awq"), "fp8-blocks"))
def test_a_fused_weight_with_a_skipped_part_is_widened(form, source, tmp_path, caplog):
    """And computes what the checkpoint says: two parts dequantised, one float, no input rounded."""
    skipped = QKV[1]
    checkpoint = write_quantised(source, tmp_path, form, skip=[skipped])
    assert skipped not in checkpoint.weights
    loaded = load(tmp_path)
    ((reason, modules),) = widened(caplog).items()
    assert (modules, "kept in different ways" in reason) == (QKV, True)
    group = 128 if form == "fp8-blocks" else None
    rounds = form.startswith("fp8")

    def rule(module: str) -> Rule | None:
        return Rule(group=group) if rounds and module not in QKV else None

    ids = list(range(5, 45))
    with watch(loaded.model) as inputs:
        found = Runner(loaded).step([(0, ids)])[0]
    reference = Reference(source, checkpoint.weights, rule)
    check(found, reference.logits(ids, inputs), reference.flips)


# -- what workers compare -----------------------------------------------------------------------


def built(path: Path, **options: str) -> Engine:
    return Engine.build(EngineConfig(model=str(path), num_pages=20, **options))


def test_workers_of_different_precision_do_not_match_though_the_revision_is_the_same(source):
    exact, rounded, again = built(source), *(built(source, quantization="fp8") for _ in "ab")
    assert exact.model.revision == rounded.model.revision
    assert exact.model.fingerprint != rounded.model.fingerprint
    assert rounded.model.fingerprint == again.model.fingerprint


def test_the_revision_is_that_of_the_checkpoint_and_not_of_what_became_of_it(source, tmp_path):
    """Equal on every device and in every dtype; another where one scale differs."""
    checkpoint = write_quantised(source, tmp_path / "one", "fp8-static")
    one = load(tmp_path / "one")
    half = load_model(str(tmp_path / "one"), dtype=torch.bfloat16, device=CPU)
    assert one.revision == half.revision
    assert one.precision
    checkpoint.tensors[f"{QKV[0]}.weight_scale"] *= 1.5
    write(source, tmp_path / "other", checkpoint)
    assert load(tmp_path / "other").revision != one.revision


# -- memory -------------------------------------------------------------------------------------


def bytes_of(path: Path, *, on_gpu: bool, quantization: str = "", dtype: str = "auto") -> int:
    """What the files' headers say that a worker needs."""
    weights = weights_of(path)
    assert weights is not None
    return model_bytes(weights, on_gpu=on_gpu, quantization=quantization, dtype=dtype)


def model_bytes(weights: Weights, **how) -> int:
    return memory.need_of(
        weights, **{"dtype": "auto", "kv_memory_bytes": 1, "num_pages": 0, **how}
    ).model_bytes


def in_memory(path: Path, dtype: torch.dtype, **options: str) -> int:
    """What is there on a CPU once it is loaded, as it is counted: before it is packed."""
    model = load_model(str(path), dtype=dtype, device=CPU, **options).model
    return sum(each.numel() * each.element_size() for each in model.parameters())


@pytest.mark.parametrize("form", mostly_slow(FORMS, "fp8-static", "awq"))
def test_memory_on_a_cpu_is_counted_from_headers(form, source, tmp_path):
    write_quantised(source, tmp_path, form)
    for dtype in ("float32", "bfloat16"):
        found = in_memory(tmp_path, getattr(torch, dtype))
        assert bytes_of(tmp_path, on_gpu=False, dtype=dtype) == pytest.approx(found, rel=COUNTED)


@pytest.mark.parametrize(("form", "least", "most"), [("fp8-dynamic", 8, 8.1), ("awq", 4, 5.5)])
def test_memory_on_a_gpu_is_that_of_the_files(form, least, most, source, tmp_path):
    """In bits of a projection's weight, scales among them; the rest is bf16."""
    write_quantised(source, tmp_path, form)
    tensors = load_file(source / "model.safetensors")
    inside = sum(each.numel() for name, each in tensors.items() if "_proj" in name)
    beside = sum(each.numel() for name, each in tensors.items() if "_proj" not in name)
    bits = 8 * (bytes_of(tmp_path, on_gpu=True) - 2 * beside) / inside
    assert least <= bits <= most


def test_fp8_takes_half_on_a_gpu_and_embedding_and_head_stay(source):
    whole, half = (bytes_of(source, on_gpu=True, quantization=each) for each in ("", "fp8"))
    outside = 2 * 2 * 384 * SHAPE["hidden"]
    assert half - outside == (whole - outside) / 2
    assert bytes_of(source, on_gpu=False, quantization="fp8") == bytes_of(source, on_gpu=False)


def test_the_check_before_loading_counts_what_is_rounded_on_a_gpu(source, monkeypatch):
    """The engine's own count, which a real checkpoint and dummy weights both go through."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    seen: list[Weights] = []

    class SeenError(Exception):
        pass

    def stop(weights: Weights) -> None:
        seen.append(weights)
        raise SeenError

    for load_format in ("auto", "dummy"):
        with pytest.raises(SeenError):
            load_model(
                str(source),
                dtype=torch.bfloat16,
                device=torch.device("cuda"),
                quantization="fp8",
                load_format=load_format,
                check=stop,
            )
    assert seen[0] == seen[1]
    counted = model_bytes(seen[0], on_gpu=True, quantization="fp8")
    assert counted == pytest.approx(bytes_of(source, on_gpu=True, quantization="fp8"), rel=0.02)
