"""What a checkpoint says of itself, and what is said where that is not supported."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from quantised_checkpoints import FORMS, quantised

from engine.model import ModelError, UnsupportedModelError
from engine.model.precision.formats import READERS, read_format

GROUP = "config_groups.group_0"
WEIGHTS = f"{GROUP}.weights"
INPUTS = f"{GROUP}.input_activations"
TENSOR, CHANNEL, BLOCKS, PACKED = (
    "compressed-tensors-tensor-static",
    "compressed-tensors-channel-dynamic",
    "compressed-tensors-blocks",
    "pack-quantized-group",
)
FP8, FP8_BLOCKS, MODELOPT = "fp8-static", "fp8-blocks", "modelopt-fp8-config"
AWQ, GPTQ = "awq", "gptq-asym"
GONE = object()


def config_of(name: str) -> dict[str, Any]:
    config = quantised({}, name).config
    assert config is not None
    return copy.deepcopy(config)


def with_value(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    *path, last = key.split(".")
    inner = config
    for part in path:
        inner = inner.setdefault(part, {})
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value
    return config


REFUSED = [
    # compressed-tensors
    (CHANNEL, "format", "int-quantized", "float-quantized, naive-quantized, pack-quantized"),
    (CHANNEL, "format", "nvfp4-pack-quantized", "float-quantized, naive-quantized, pack-quantized"),
    (CHANNEL, "format", "marlin-24", "float-quantized, naive-quantized, pack-quantized"),
    (CHANNEL, "format", "mixed-precision", "float-quantized, naive-quantized, pack-quantized"),
    (CHANNEL, f"{GROUP}.format", "mxfp8-quantized", "float-quantized, naive-quantized, pack-quan"),
    (CHANNEL, f"{WEIGHTS}.num_bits", 4, "supported: 8"),
    (CHANNEL, f"{WEIGHTS}.type", "int", "supported: float"),
    (CHANNEL, f"{WEIGHTS}.symmetric", False, "supported: true"),
    (CHANNEL, f"{WEIGHTS}.strategy", "group", "supported: tensor, channel, block"),
    (CHANNEL, f"{WEIGHTS}.strategy", "attn_head", "supported: tensor, channel, block"),
    (CHANNEL, f"{WEIGHTS}.dynamic", True, "supported: false"),
    (CHANNEL, f"{INPUTS}.num_bits", 4, "supported: 8"),
    (CHANNEL, f"{INPUTS}.strategy", "tensor", "supported: token"),
    (CHANNEL, f"{INPUTS}.strategy", "group", "supported: token"),
    (CHANNEL, f"{INPUTS}.dynamic", "local", "supported: true, false"),
    (TENSOR, f"{INPUTS}.strategy", "token", "supported: tensor"),
    (TENSOR, f"{INPUTS}.symmetric", False, "supported: true"),
    (BLOCKS, f"{WEIGHTS}.block_structure", [64, 128], "supported: [128, 128]"),
    (BLOCKS, f"{WEIGHTS}.block_structure", None, "supported: [128, 128]"),
    (BLOCKS, f"{INPUTS}.strategy", "token", "supported: group"),
    (BLOCKS, f"{INPUTS}.group_size", 64, "supported: 128"),
    (PACKED, f"{WEIGHTS}.num_bits", 8, "supported: 4"),
    (PACKED, f"{WEIGHTS}.num_bits", 3, "supported: 4"),
    (PACKED, f"{WEIGHTS}.type", "float", "supported: int"),
    (PACKED, f"{WEIGHTS}.strategy", "tensor", "supported: group, channel"),
    (PACKED, f"{WEIGHTS}.group_size", -2, "a number of inputs is, and -1 for all of a channel"),
    (PACKED, f"{WEIGHTS}.group_size", "128", "a number of inputs is"),
    (PACKED, f"{WEIGHTS}.actorder", "group", "supported: null, false, weight, static"),
    (PACKED, f"{WEIGHTS}.actorder", True, "supported: null, false, weight, static"),
    (PACKED, INPUTS, {"num_bits": 8, "type": "int"}, "inputs that are not rounded are"),
    (CHANNEL, f"{GROUP}.output_activations", {"num_bits": 8}, "outputs that are not rounded are"),
    (CHANNEL, "sparsity_config.format", "sparse-24-bitmask", "supported: dense, null"),
    (CHANNEL, "transform_config", {"config_groups": {"R1": {}}}, "checkpoints without transforms"),
    (CHANNEL, GROUP, ["Linear"], "an object is"),
    (CHANNEL, "ignore", "lm_head", "a list of names is"),
    (CHANNEL, f"{GROUP}.targets", [7], "a list of names is"),
    # fp8
    (FP8, "activation_scheme", "local", "supported: static, dynamic"),
    (FP8, "weight_block_size", [1, 128], "supported: [128, 128] and none"),
    (FP8_BLOCKS, "weight_block_size", [64, 64], "supported: [128, 128] and none"),
    (FP8_BLOCKS, "activation_scheme", "static", "supported: dynamic"),
    (FP8_BLOCKS, "fmt", "e5m2", "supported: e4m3, null"),
    (FP8_BLOCKS, "scale_fmt", "ue8m0", "supported: float, null"),
    (FP8_BLOCKS, "modules_to_convert", ["model.embed_tokens"], "float embeddings are"),
    # ModelOpt
    (MODELOPT, "quant_algo", "NVFP4", "supported: fp8, fp8_per_channel_per_token"),
    (MODELOPT, "quant_algo", "W4A8_AWQ", "supported: fp8, fp8_per_channel_per_token"),
    (MODELOPT, "quant_algo", "FP8_PB_WO", "supported: fp8, fp8_per_channel_per_token"),
    (MODELOPT, "quant_algo", "MIXED_PRECISION", "supported: fp8, fp8_per_channel_per_token"),
    (MODELOPT, "quant_algo", GONE, "supported: fp8, fp8_per_channel_per_token"),
    (MODELOPT, "quantized_layers", {"model.layers.0": {}}, "one quant_algo for all layers is"),
    # AWQ
    (AWQ, "bits", 8, "supported: 4"),
    (AWQ, "bits", GONE, "supported: 4"),
    (AWQ, "version", "gemv", "supported: gemm"),
    (AWQ, "version", "gemv_fast", "supported: gemm"),
    (AWQ, "version", "exllama", "supported: gemm"),
    (AWQ, "backend", "llm-awq", "supported: autoawq"),
    (AWQ, "group_size", 0, "a number of inputs is"),
    (AWQ, "group_size", GONE, "a number of inputs is"),
    (AWQ, "lm_head", True, "a float lm_head is"),
    # GPTQ
    (GPTQ, "bits", 8, "supported: 4"),
    (GPTQ, "bits", "4", "supported: 4"),
    (GPTQ, "group_size", 12.5, "a number of inputs is"),
    (GPTQ, "checkpoint_format", "marlin", "supported: gptq, gptq_v2"),
    (GPTQ, "is_marlin_format", True, "false is"),
    (GPTQ, "pack_dtype", "int64", "supported: int32, null"),
    (GPTQ, "lm_head", True, "a float lm_head is"),
    (GPTQ, "modules_in_block_to_quantize", "o_proj", "a list of names is"),
]


@pytest.mark.parametrize(
    ("name", "key", "value", "works"), REFUSED, ids=[f"{each[0]}-{each[1]}" for each in REFUSED]
)
def test_what_is_not_supported_is_refused_by_key_and_value(name, key, value, works, tmp_path):
    config = with_value(config_of(name), key, value)
    with pytest.raises(UnsupportedModelError) as error:
        read_format({"quantization_config": config}, tmp_path)
    said = "is missing" if value is GONE else f"is {value!r}"
    start = f"config.json: quantization_config.{key} {said}, which is not supported; "
    assert str(error.value).startswith(start)
    assert works in str(error.value).removeprefix(start)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "modelopt-fp8"])
def test_what_is_changed_above_is_supported_as_it_was(name, tmp_path):
    form = read_format({"quantization_config": config_of(name)}, tmp_path)
    assert form is not None
    assert form.scheme("model.layers.0.mlp.up_proj") is not None


@pytest.mark.parametrize("method", ["bitsandbytes", "gguf", "hqq", "fbgemm_fp8", "auto-round", 8])
def test_another_method_is_refused_and_those_that_work_are_named(method, tmp_path):
    with pytest.raises(UnsupportedModelError) as error:
        read_format({"quantization_config": {"quant_method": method, "bits": 4}}, tmp_path)
    assert str(error.value) == (
        f"config.json: quantization_config.quant_method is {method!r}, which is not supported;"
        " supported: compressed-tensors, fp8, modelopt, awq, gptq, mxfp4"
    )
    assert set(READERS) == {"compressed-tensors", "fp8", "modelopt", "awq", "gptq", "mxfp4"}


def test_a_method_that_is_not_said(tmp_path):
    with pytest.raises(UnsupportedModelError, match="quant_method is missing"):
        read_format({"quantization_config": {"load_in_4bit": True}}, tmp_path)
    with pytest.raises(UnsupportedModelError, match="quantization_config is 'fp8', which is not"):
        read_format({"quantization_config": "fp8"}, tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        (CHANNEL, "ignore", []),
        (CHANNEL, "ignore", None),
        (PACKED, f"{GROUP}.targets", ["re:.*"]),
        (MODELOPT, "ignore", ["model.layers.0*"]),
    ],
)
def test_a_quantised_head_or_embedding_is_refused(name, key, value, tmp_path):
    config = with_value(config_of(name), key, value)
    module = r"model\.embed_tokens" if value == ["re:.*"] else "lm_head"
    message = f"quantises {module}, which is not supported; supported are checkpoints that leave"
    with pytest.raises(UnsupportedModelError, match=message):
        read_format({"quantization_config": config}, tmp_path)


def test_float_checkpoints_have_no_format(tmp_path):
    assert read_format({}, tmp_path) is None
    assert read_format({"quantization_config": None, "compression_config": {}}, tmp_path) is None


def test_a_modelopt_file_is_refused_by_its_name(tmp_path):
    content = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    message = re.escape("hf_quant_config.json: quantization.quant_algo is 'NVFP4', which is not")
    with pytest.raises(UnsupportedModelError, match=message):
        read_format({}, tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json"):
        read_format({}, tmp_path)


def test_config_json_goes_before_the_modelopt_file(tmp_path):
    content = {"quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    form = read_format({"quantization_config": config_of(MODELOPT)}, tmp_path)
    assert form is not None
    assert form.name == "modelopt fp8"
