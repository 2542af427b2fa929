"""Which modules a checkpoint quantises: each library matches names by a rule of its own."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
from quantised_checkpoints import FORMS, quantised
from torch import nn

from engine.model import UnsupportedModelError
from engine.model.precision.base import Format, Kind, Scheme
from engine.model.precision.formats import expressions, read_format
from engine.model.precision.formats.expressions import MOST_CHARACTERS, Expressions
from engine.model.precision.formats.layout import Fp8Layout, LayoutFormat, Scales
from engine.model.precision.formats.names import is_skipped, is_target

PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
MODULES = [f"model.layers.{layer}.{name}" for layer in (0, 1, 10) for name in PROJECTIONS]


def opened(tmp_path, name: str, **changes: Any) -> Format:
    config = {**copy.deepcopy(quantised({}, name).config or {}), **changes}
    form = read_format({"quantization_config": config}, tmp_path)
    assert form is not None
    return form


def float_modules(form: Format) -> list[str]:
    return [module for module in MODULES if form.scheme(module) is None]


@pytest.mark.parametrize("name", [name for name in FORMS if FORMS[name].file == ""])
def test_skipped_modules_stay_float_in_each_form(name, tmp_path):
    skip = ["model.layers.1.mlp.down_proj", "model.layers.10.self_attn.q_proj"]
    config = quantised({}, name, skip).config
    form = read_format({"quantization_config": config}, tmp_path)
    assert form is not None
    assert float_modules(form) == skip


# -- compressed-tensors -------------------------------------------------------------------------

TARGETS = [
    "Linear",
    "Embedding",
    "q_proj",
    "model.layers.1.mlp.down_proj",
    "re:.*down_proj",
    "re:.*self_attn.*",
    "re:model.layers.1.",
    "re:q_proj",
    "re:.*\\.(k|v)_proj$",
]


@pytest.mark.parametrize("target", TARGETS)
def test_targets_match_as_in_compressed_tensors(target):
    from compressed_tensors.utils import match_name

    own = Expressions()
    for module in (*MODULES, "lm_head", "model.embed_tokens"):
        assert is_target(module, target, own) == match_name(module, target)


def test_the_group_of_a_module_is_that_of_compressed_tensors(tmp_path):
    from compressed_tensors.utils.match import match_targets

    config = copy.deepcopy(quantised({}, "pack-quantized-group").config)
    assert config is not None
    group = config["config_groups"]["group_0"]
    config["config_groups"] = {}
    for size, target in enumerate(TARGETS, 1):
        part = {**copy.deepcopy(group), "targets": [target]}
        part["weights"]["group_size"] = size
        if target != "Embedding":
            config["config_groups"][f"group_{size}"] = part
    form = read_format({"quantization_config": config}, tmp_path)
    assert form is not None
    for module in MODULES:
        first = match_targets(module, nn.Linear(1, 1), TARGETS)[0]
        assert form.scheme(module) == Scheme(Kind.INT4, group=TARGETS.index(first) + 1), module


def test_groups_of_several_formats(tmp_path):
    fp8, packed = (
        copy.deepcopy(quantised({}, name).config or {})
        for name in ("compressed-tensors-channel-dynamic", "pack-quantized-asym")
    )
    groups = {
        "group_0": {
            **fp8["config_groups"]["group_0"],
            "format": "float-quantized",
            "targets": ["re:.*self_attn.*"],
        },
        "group_1": {**packed["config_groups"]["group_0"], "format": "pack-quantized"},
        "group_2": {"targets": ["re:.*up_proj$"], "weights": None},
    }
    config = {**fp8, "format": "mixed-precision", "config_groups": groups}
    form = read_format({"quantization_config": config}, tmp_path)
    assert form is not None
    assert form.scheme(MODULES[0]) == Scheme(Kind.FP8_CHANNELS)
    assert form.scheme("model.layers.0.mlp.gate_proj") == Scheme(Kind.INT4, group=32)
    assert form.scheme("model.layers.0.mlp.up_proj") is None
    assert form.name == "compressed-tensors float-quantized pack-quantized"


def test_what_compressed_tensors_ignores_stays_float(tmp_path):
    name = "compressed-tensors-channel-dynamic"
    form = opened(tmp_path, name, ignore=["lm_head", "re:.*down_proj", "model.layers.0"])
    assert float_modules(form) == [module for module in MODULES if module.endswith("down_proj")]
    assert float_modules(opened(tmp_path, name, ignore=["Linear"])) == MODULES


def test_older_places_of_the_description(tmp_path):
    config = quantised({}, "pack-quantized-asym").config or {}
    wanted = Scheme(Kind.INT4, group=32)
    del config["quant_method"]
    nested = {"quant_method": "compressed-tensors", "quantization_config": config}
    for stated in ({"compression_config": config}, {"quantization_config": nested}):
        form = read_format(stated, tmp_path)
        assert form is not None
        assert form.scheme(MODULES[0]) == wanted


@pytest.mark.parametrize("order", ["weight", "static", None])
def test_an_order_of_weights_alone_is_no_act_order(order, tmp_path):
    config = copy.deepcopy(quantised({}, "pack-quantized-group").config or {})
    config["config_groups"]["group_0"]["weights"]["actorder"] = order
    form = read_format({"quantization_config": config}, tmp_path)
    assert form is not None
    assert not any("g_idx" in name for name in form.specs(MODULES[0], (32, 64)))


# -- the others ---------------------------------------------------------------------------------

KEYS = [
    "lm_head",
    "model.layers.1",
    "model.layers.1.mlp.down_proj",
    "model.layers.0.mlp.gate",
    "mlp.down_proj",
    "down_proj",
    "self_attn",
    "model.layers.*.self_attn",
    r"model\.layers\.\d+\.mlp\.(gate|up)_proj",
]


@pytest.mark.parametrize("key", KEYS)
def test_fp8_skips_as_transformers_does(key, tmp_path):
    from transformers.quantizers.quantizers_utils import should_convert_module

    kept = [module for module in MODULES if not should_convert_module(module, [key])]
    own = Expressions()
    assert [module for module in MODULES if is_skipped(module, [key], own)] == kept
    for name, place in (("fp8-blocks", "modules_to_not_convert"), ("fp8-static", "ignored_layers")):
        assert float_modules(opened(tmp_path, name, **{place: [key]})) == kept


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("model.layers.1.*", 7),
        ("model.layers.1*", 14),
        ("*self_attn*", 12),
        ("model.layers.0.self_attn.[qk]_proj", 2),
        ("model.layers.1", 7),
        ("self_attn", 12),
        ("model.layers.0.mlp.gate", 0),
        ("*lm_head*", 0),
    ],
)
def test_modelopt_excludes_by_wildcards(pattern, count, tmp_path):
    form = opened(tmp_path, "modelopt-fp8-config", ignore=["lm_head", pattern])
    assert len(float_modules(form)) == count


@pytest.mark.parametrize(
    ("key", "count"), [("self_attn", 12), ("down_proj", 3), ("model.layers.0.", 7), ("experts", 0)]
)
def test_awq_skips_by_any_part_of_a_name(key, count, tmp_path):
    form = opened(tmp_path, "awq", modules_to_not_convert=[key])
    assert len(float_modules(form)) == count


def test_awq_says_its_bits_and_group_by_older_names_too(tmp_path):
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}
    form = read_format({"quantization_config": config}, tmp_path)
    assert form is not None
    assert form.scheme(MODULES[0]) == Scheme(Kind.INT4, group=64)


def test_gptq_quantises_the_modules_that_it_names(tmp_path):
    lists = [["self_attn.k_proj", "self_attn.q_proj"], ["mlp.down_proj"]]
    form = opened(tmp_path, "gptq", modules_in_block_to_quantize=lists)
    assert len(MODULES) - len(float_modules(form)) == 9
    form = opened(tmp_path, "gptq", modules_in_block_to_quantize=[MODULES[0]])
    assert [module for module in MODULES if form.scheme(module)] == MODULES[:1]


def test_gptq_rules_of_modules(tmp_path):
    dynamic = {r"-:.*\.down_proj": {}, r"+:.*\.layers\.1\.": {"group_size": 64}, r".*gate": {}}
    form = opened(tmp_path, "gptq-v2", dynamic=dynamic)
    assert len(float_modules(form)) == 3
    assert form.scheme("model.layers.1.mlp.up_proj") == Scheme(Kind.INT4, group=64)
    assert form.scheme("model.layers.0.mlp.gate_proj") == Scheme(Kind.INT4, group=32)


def test_gptq_rules_that_are_not_supported(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"dynamic\..*up_proj\.bits is 8, .*orted: 4"):
        opened(tmp_path, "gptq-v2", dynamic={"+:.*up_proj": {"bits": 8}})
    form = opened(tmp_path, "gptq-v2", dynamic={"-:[": {}})
    with pytest.raises(UnsupportedModelError, match=r"names modules by '\[', which is no regular"):
        form.scheme(MODULES[0])


# -- expressions --------------------------------------------------------------------------------

ENDLESS = r"(?:.|\w)*(?:.|\w)*[!?]"
"""Backtracks through more ways than there are to try."""


@pytest.mark.parametrize(
    ("form", "key", "value"),
    [
        ("compressed-tensors-channel-dynamic", "ignore", ["lm_head", f"re:{ENDLESS}"]),
        ("fp8-static", "ignored_layers", [ENDLESS]),
        ("gptq", "dynamic", {f"-:{ENDLESS}": {}}),
    ],
)
def test_an_expression_that_never_ends_is_refused(form, key, value, tmp_path, monkeypatch):
    monkeypatch.setattr(expressions, "ALLOWED_S", 0.2)
    config = {**copy.deepcopy(quantised({}, form).config or {}), key: value}
    form = read_format({"quantization_config": config}, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"by '\(\?:.*', which takes too long to match"):
        form.scheme(MODULES[0])


def test_matches_of_a_description_share_their_time(monkeypatch):
    slow, free = r"(?:.|.)*[!?]", Expressions()

    def took_s(size: int) -> float:
        began_s = time.process_time()
        assert not free.match(slow, "x" * size)
        return time.process_time() - began_s

    name = "x" * next(size for size in range(1, 64) if took_s(size) > 0.02)
    monkeypatch.setattr(expressions, "ALLOWED_S", 0.2)
    own = Expressions()

    def repeat() -> None:
        for _ in range(40):
            own.match(slow, name)

    with pytest.raises(UnsupportedModelError, match="takes too long"):
        repeat()


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a" * (MOST_CHARACTERS + 1), r"'a{100}\.\.\.', which has more than 1000 characters"),
        ("[", r"'\[', which is no regular expression"),
        ("(" * 500 + ")" * 500, r"which is no regular expression"),
        ("(?<=a*)b{9,1}", r"which is no regular expression"),
    ],
)
def test_what_is_no_expression_is_refused_by_name(pattern, why):
    with pytest.raises(UnsupportedModelError, match=f"names modules by .*{why}"):
        Expressions().match(pattern, MODULES[0])


def test_expressions_of_published_checkpoints():
    own = Expressions()
    for pattern, wanted in (
        (r".*\.(?!down)\w+_proj$", 18),
        (r"^model\.layers\.(?:1|10)\..*", 14),
        (r".*(?<=mlp\.)gate_proj", 3),
        (r"(?i).*SELF_ATTN.*", 12),
        ("a" * MOST_CHARACTERS, 0),
    ):
        assert sum(own.match(pattern, module) for module in MODULES) == wanted


# -- tensors that no product needs --------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FORMS if FORMS[name].file == ""])
def test_scales_of_the_cache_are_unused_and_other_tensors_are_not(name, tmp_path):
    form = opened(tmp_path, name)
    attention = "model.layers.0.self_attn"
    for unused in ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.output_scale"):
        assert form.is_unused(f"{attention}.{unused}")
    for used in ("q_proj.weight_scale", "q_proj.g_idx", "rank_scale", "q_proj.weight_g_idx"):
        assert not form.is_unused(f"{attention}.{used}")


@pytest.mark.parametrize("module", ["self_attn.o_proj", "block_sparse_moe.experts.3.w2"])
def test_only_gptq_may_have_a_bias_that_the_model_lacks(module, tmp_path):
    name = f"model.layers.0.{module}.bias"
    gptq = opened(tmp_path, "gptq")
    assert gptq.is_unused(name)
    assert gptq.is_zero(name)
    assert not gptq.is_zero(f"model.layers.0.{module}.k_scale")
    assert not gptq.is_unused("model.norm.bias")
    assert not opened(tmp_path, "awq").is_unused(name)


def test_the_patterns_of_a_description_are_tried_once_for_a_module():
    asked: list[str] = []

    def layout(module: str) -> Fp8Layout | None:
        asked.append(module)
        return Fp8Layout(Scales.CHANNEL) if module == "a" else None

    form = LayoutFormat("some", layout)
    for _ in range(3):
        assert form.scheme("a") == Scheme(Kind.FP8_CHANNELS)
        assert form.specs("a", (16, 16))
        assert form.scheme("b") is None
    assert asked == ["a", "b"]
