"""Quantised checkpoints in their published forms, made from float ones by rounding to nearest.

It packs by itself and shares no code with `engine.model.precision.formats`, so that a mistake there
is found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

INPUT_SCALE = 0.03
GROUP = 32
PROJECTIONS = ("_proj", "_proj_with_mqa", ".w1", ".w2", ".w3")
"""Ends of the names of modules that are quantised. The last three are Mixtral's experts."""


class Written(NamedTuple):
    """One module as a form writes it."""

    tensors: dict[str, Tensor]
    """By the last part of the name."""
    weight: Tensor
    """[N, K] float64: what they stand for, by the form's own formula."""


@dataclass
class Checkpoint:
    """A quantised checkpoint."""

    tensors: dict[str, Tensor]
    config: dict[str, Any] | None
    """`quantization_config` of config.json."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Other JSON files of its folder."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """[N, K] float64 by module: what its tensors stand for."""


Writer = Callable[[Tensor], Written]


class Form(NamedTuple):
    """How a library publishes."""

    write: Writer
    config: Callable[[Sequence[str]], dict[str, Any]]
    """Takes names of modules that stay float, beside lm_head."""
    file: str = ""
    """The file of its description; empty: config.json."""


def quantised(tensors: Mapping[str, Tensor], form: str, skip: Sequence[str] = ()) -> Checkpoint:
    """A checkpoint in one of `FORMS`, from float tensors with Hugging Face names. All projections
    are quantised but those named in `skip` (full names of modules)."""
    chosen = FORMS[form]
    result = Checkpoint({}, None if chosen.file else chosen.config(skip))
    if chosen.file:
        result.files[chosen.file] = chosen.config(skip)
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        if last != "weight" or not module.endswith(PROJECTIONS) or module in skip:
            result.tensors[name] = tensor
            continue
        written = chosen.write(tensor)
        parts = {f"{module}.{key}": each.contiguous() for key, each in written.tensors.items()}
        result.tensors |= parts
        result.weights[module] = written.weight
    return result


def quantise_folder(path: Path, form: str, skip: Sequence[str] = ()) -> Checkpoint:
    """Writes the float checkpoint of a folder (one shard) anew, in one of `FORMS`."""
    checkpoint = quantised(load_file(path / "model.safetensors"), form, skip)
    save_file(checkpoint.tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    if checkpoint.config is not None:
        config["quantization_config"] = checkpoint.config
    (path / "config.json").write_text(json.dumps(config))
    for name, content in checkpoint.files.items():
        (path / name).write_text(json.dumps(content))
    return checkpoint


# -- FP8 ----------------------------------------------------------------------------------------


def _fp8(weight: Tensor, size: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """e4m3 values, one scale for each `size`, and their product in float64."""
    rows, columns = (-(-each // part) for each, part in zip(weight.shape, size, strict=True))
    scales = torch.empty(rows, columns, dtype=dtype)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    wide = torch.empty(weight.shape, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            place = (
                slice(row * size[0], (row + 1) * size[0]),
                slice(column * size[1], (column + 1) * size[1]),
            )
            part = weight[place].float()
            scales[row, column] = part.abs().max().clamp_min(1e-6) / 448
            scale = scales[row, column].float()
            values[place] = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            wide[place] = values[place].double() * scale.double()
    return values, scales, wide


def _per_tensor(*, dtype: torch.dtype, static: bool, shape: tuple[int, ...]) -> Writer:
    def write(weight: Tensor) -> Written:
        values, scales, wide = _fp8(weight, (weight.shape[0], weight.shape[1]), dtype)
        tensors = {"weight": values, "weight_scale": scales.reshape(shape)}
        if static:
            tensors["input_scale"] = torch.full(shape, INPUT_SCALE, dtype=dtype)
        return Written(tensors, wide)

    return write


def _per_channel(*, dtype: torch.dtype, flat: bool = False) -> Writer:
    def write(weight: Tensor) -> Written:
        values, scales, wide = _fp8(weight, (1, weight.shape[1]), dtype)
        scales = scales.flatten() if flat else scales
        return Written({"weight": values, "weight_scale": scales}, wide)

    return write


def _per_block(name: str) -> Writer:
    def write(weight: Tensor) -> Written:
        values, scales, wide = _fp8(weight, (128, 128), torch.bfloat16)
        return Written({"weight": values, name: scales}, wide)

    return write


# -- INT4 ---------------------------------------------------------------------------------------


class Int4(NamedTuple):
    """Rounded to four bits."""

    values: np.ndarray
    """[N, K], 0 to 15."""
    zeros: np.ndarray
    """[N, K / group], 0 to 15."""
    scales: Tensor
    """[N, K / group]."""
    weight: Tensor


def _int4(weight: Tensor, group: int, dtype: torch.dtype, *, symmetric: bool) -> Int4:
    outputs, inputs = weight.shape
    group = inputs if group == -1 else group
    parts = weight.double().reshape(outputs, inputs // group, group)
    low, high = parts.amin(2).clamp_max(0), parts.amax(2).clamp_min(0)
    span = 2 * torch.maximum(-low, high) if symmetric else high - low
    scales = (span / 15).clamp_min(1e-5).to(dtype)
    step = scales.double()
    zeros = torch.full_like(step, 8) if symmetric else (-low / step).round().clamp(0, 15)
    values = ((parts / step[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15)
    wide = ((values - zeros[:, :, None]) * step[:, :, None]).reshape(outputs, inputs)
    whole = values.reshape(outputs, inputs).numpy().astype(np.uint32)
    return Int4(whole, zeros.numpy().astype(np.uint32), scales, wide)


def _words(values: np.ndarray, order: Sequence[int] = range(8)) -> Tensor:
    """[R, C] -> [R, C / 8] int32: `order` names the value that goes into each four bits, from the
    lowest."""
    values = np.pad(values, ((0, 0), (0, -values.shape[1] % 8)))
    words = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
    for place, value in enumerate(order):
        words |= values[:, value::8] << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32).copy())


def _pack_quantized(group: int, *, symmetric: bool) -> Writer:
    def write(weight: Tensor) -> Written:
        rounded = _int4(weight, group, torch.bfloat16, symmetric=symmetric)
        tensors = {
            "weight_packed": _words(rounded.values),
            "weight_scale": rounded.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _words(rounded.zeros.T).T
        return Written(tensors, rounded.weight)

    return write


def _awq(*, symmetric: bool) -> Writer:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def write(weight: Tensor) -> Written:
        rounded = _int4(weight, GROUP, torch.float16, symmetric=symmetric)
        tensors = {
            "qweight": _words(rounded.values.T, order),
            "qzeros": _words(rounded.zeros.T, order),
            "scales": rounded.scales.T,
        }
        return Written(tensors, rounded.weight)

    return write


def _gptq(group: int, *, symmetric: bool, less: int) -> Writer:
    """`less`: what is taken from zero points before they are stored."""

    def write(weight: Tensor) -> Written:
        inputs = weight.shape[1]
        rounded = _int4(weight, group, torch.float16, symmetric=symmetric)
        stored = (rounded.zeros - np.uint32(less)) & np.uint32(15)
        tensors = {
            "qweight": _words(rounded.values).T,
            "qzeros": _words(stored.T),
            "scales": rounded.scales.T,
            "g_idx": torch.arange(inputs, dtype=torch.int32) // (inputs if group == -1 else group),
        }
        return Written(tensors, rounded.weight)

    return write


# -- descriptions -------------------------------------------------------------------------------


def _arguments(**changes: Any) -> dict[str, Any]:
    usual = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "tensor",
        "symmetric": True,
        "type": "float",
    }
    return {**usual, **changes}


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Any:
    """As of llm-compressor, e.g. RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8."""
    return lambda skip: {
        "config_groups": {
            "group_0": {
                "input_activations": inputs,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": weights,
            }
        },
        "format": form,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head", *skip],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _fp8_config(scheme: str) -> Any:
    """As of AutoFP8, e.g. neuralmagic/Meta-Llama-3-8B-Instruct-FP8."""
    return lambda skip: {
        "activation_scheme": scheme,
        "ignored_layers": ["lm_head", *skip],
        "quant_method": "fp8",
    }


def _fp8_blocks_config(skip: Sequence[str]) -> dict[str, Any]:
    """As of Qwen/Qwen3-8B-FP8."""
    config: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    return {**config, "modules_to_not_convert": ["lm_head", *skip]} if skip else config


def _modelopt_file(skip: Sequence[str]) -> dict[str, Any]:
    """As of nvidia/Llama-3.1-8B-Instruct-FP8."""
    return {
        "producer": {"name": "modelopt", "version": "0.27.0"},
        "quantization": {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", *skip],
        },
    }


def _modelopt_config(algorithm: str) -> Any:
    """As newer versions write it into config.json."""
    inputs = {"dynamic": False, "num_bits": 8, "type": "float"}
    return lambda skip: {
        "config_groups": {
            "group_0": {"input_activations": inputs, "weights": inputs, "targets": ["Linear"]}
        },
        "ignore": ["lm_head", *skip],
        "kv_cache_scheme": inputs,
        "quant_algo": algorithm,
        "producer": {"name": "modelopt", "version": "0.39.0"},
        "quant_method": "modelopt",
    }


def _awq_config(*, zero_point: bool) -> Any:
    """As of Qwen/Qwen2.5-7B-Instruct-AWQ."""
    return lambda skip: {
        "bits": 4,
        "group_size": GROUP,
        "modules_to_not_convert": list(skip) or None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": zero_point,
    }


def _gptq_config(group: int, *, symmetric: bool, version: str = "") -> Any:
    """As of Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4; with `version`, as of GPTQModel."""
    return lambda skip: {
        "batch_size": 1,
        "bits": 4,
        "block_name_to_quantize": None,
        "cache_block_outputs": True,
        "damp_percent": 0.01,
        "dataset": None,
        "desc_act": False,
        "exllama_config": {"version": 1},
        "group_size": group,
        "max_input_length": None,
        "modules_in_block_to_quantize": None,
        "quant_method": "gptq",
        "sym": symmetric,
        "true_sequential": True,
        "use_cuda_fp16": False,
        **({"checkpoint_format": version, "lm_head": False} if version else {}),
        "dynamic": {f"-:{re.escape(each)}$": {} for each in skip},
    }


_TOKEN = _arguments(dynamic=True, strategy="token", observer=None)
_BLOCK = _arguments(strategy="block", block_structure=[128, 128])
_INT4 = _arguments(num_bits=4, type="int", strategy="group", group_size=GROUP)

FORMS: dict[str, Form] = {
    "compressed-tensors-tensor-static": Form(
        _per_tensor(dtype=torch.bfloat16, static=True, shape=(1,)),
        _compressed("float-quantized", _arguments(), _arguments()),
    ),
    "compressed-tensors-channel-dynamic": Form(
        _per_channel(dtype=torch.bfloat16),
        _compressed("float-quantized", _arguments(strategy="channel"), _TOKEN),
    ),
    "compressed-tensors-blocks": Form(
        _per_block("weight_scale"),
        _compressed(
            "float-quantized",
            _BLOCK,
            _arguments(dynamic=True, strategy="group", group_size=128, observer=None),
        ),
    ),
    "compressed-tensors-float-input": Form(
        _per_channel(dtype=torch.float32),
        _compressed("naive-quantized", _arguments(strategy="channel"), None),
    ),
    "pack-quantized-group": Form(
        _pack_quantized(GROUP, symmetric=True), _compressed("pack-quantized", _INT4, None)
    ),
    "pack-quantized-channel": Form(
        _pack_quantized(-1, symmetric=True),
        _compressed("pack-quantized", {**_INT4, "strategy": "channel", "group_size": None}, None),
    ),
    "pack-quantized-asym": Form(
        _pack_quantized(GROUP, symmetric=False),
        _compressed("pack-quantized", {**_INT4, "symmetric": False}, None),
    ),
    "fp8-static": Form(
        _per_tensor(dtype=torch.float32, static=True, shape=()), _fp8_config("static")
    ),
    "fp8-dynamic": Form(
        _per_tensor(dtype=torch.float32, static=False, shape=()), _fp8_config("dynamic")
    ),
    "fp8-blocks": Form(_per_block("weight_scale_inv"), _fp8_blocks_config),
    "modelopt-fp8": Form(
        _per_tensor(dtype=torch.float32, static=True, shape=()),
        _modelopt_file,
        "hf_quant_config.json",
    ),
    "modelopt-fp8-config": Form(
        _per_tensor(dtype=torch.float32, static=True, shape=()), _modelopt_config("FP8")
    ),
    "modelopt-fp8-channel": Form(
        _per_channel(dtype=torch.float32, flat=True),
        _modelopt_config("FP8_PER_CHANNEL_PER_TOKEN"),
    ),
    "awq": Form(_awq(symmetric=False), _awq_config(zero_point=True)),
    "awq-symmetric": Form(_awq(symmetric=True), _awq_config(zero_point=False)),
    "gptq": Form(_gptq(GROUP, symmetric=True, less=1), _gptq_config(GROUP, symmetric=True)),
    "gptq-asym": Form(
        _gptq(GROUP, symmetric=False, less=1), _gptq_config(GROUP, symmetric=False, version="gptq")
    ),
    "gptq-channel": Form(
        _gptq(-1, symmetric=False, less=1), _gptq_config(-1, symmetric=False, version="gptq")
    ),
    "gptq-v2": Form(
        _gptq(GROUP, symmetric=False, less=0),
        _gptq_config(GROUP, symmetric=False, version="gptq_v2"),
    ),
}
