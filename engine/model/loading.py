"""Loads weights from a Hugging Face folder (safetensors), a GGUF file, or a seed.

Tensors go one at a time straight into the model's own (fused) weights, so there is never a second
copy of the model in memory.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints import CheckpointError, Weights, safetensors_files
from engine.model.config import ModelConfig, ModelError, UnsupportedModelError, read_config
from engine.model.gguf import GgufFile
from engine.model.llama import Layer, Model

Check = Callable[[Weights], None]
"""Takes the number of weights before they are read, and may refuse them."""
Progress = Callable[[str, int, int], None]
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DUMMY_STD = 0.02
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    model: Model
    config: ModelConfig
    revision: str
    """Digest of the config and of sampled weight rows, or of the dummy seed."""
    path: str
    """The folder from which it was loaded."""


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    check: Check | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Builds the model and fills in its weights.

    Args:
        path: folder or GGUF file.
        dtype: dtype of the weights in memory.
        device: device of the weights.
        load_format: one of `LOAD_FORMATS`. auto: GGUF if the path is a GGUF file or has no other
            weights.
        seed: seed of dummy weights; equal seeds give equal weights in every process.
        check: is called before the memory of the weights is taken; what it raises goes through.
        progress: called with ("weights", tensors done, tensors in all).

    Raises:
        UnsupportedModelError: the engine does not support this model.
        ModelError: files are missing, or do not fit the config.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    folder, gguf = _locate(path, load_format)
    checkpoint = GgufFile(gguf) if gguf else None
    config = checkpoint.config() if checkpoint else read_config(folder)
    if check is not None:
        check(_weights(config, dtype))
    model = Model(config, dtype, device)
    if load_format == "dummy":
        _fill_dummy(model, seed)
    else:
        tensors = checkpoint.tensors(config) if checkpoint else _read_safetensors(folder)
        _fill(model, tensors, progress)
    return LoadedModel(model, config, _revision(model, config), str(gguf or folder))


def _weights(config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Counts weights without memory for them."""
    model = Model(config, dtype, torch.device("meta"))
    count = sum(parameter.numel() for parameter in model.parameters())
    return Weights(count, model.embedding.numel() if config.tie_embeddings else 0)


# -- finding ------------------------------------------------------------------------------------


def _locate(name: str, load_format: str) -> tuple[Path, Path | None]:
    """The folder, and the GGUF file to read, if any."""
    path = Path(name).expanduser()
    if path.is_file():
        if load_format == "safetensors":
            raise ModelError(f"{path} is a file: safetensors are read from a folder")
        return path.parent, path
    if not path.is_dir():
        raise ModelError(f"there is no {path}")
    files = sorted(path.glob("*.gguf")) if _wants_gguf(path, load_format) else []
    if load_format == "gguf" and not files:
        raise ModelError(f"{path} holds no GGUF file")
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise ModelError(f"{path} holds {len(files)} GGUF files ({names}): name one of them")
    return path, files[0] if files else None


def _wants_gguf(folder: Path, load_format: str) -> bool:
    if load_format == "auto":
        return not any(folder.glob("*.safetensors"))
    # Dummy weights need only a config.
    return load_format == "gguf" or (
        load_format == "dummy" and not (folder / "config.json").is_file()
    )


# -- places of a checkpoint's tensors -----------------------------------------------------------


def targets(model: Model) -> dict[str, Tensor]:
    """The part of the model's weights that each tensor of a checkpoint fills, by the tensor's name.
    Parts of a fused weight are views into it."""
    parts: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.norm.weight,
    }
    if not model.config.tie_embeddings:
        parts["lm_head.weight"] = model.head
    for layer in model.layers:
        assert isinstance(layer, Layer)
        prefix = f"model.layers.{layer.index}."
        parts.update({prefix + name: part for name, part in _layer_targets(layer)})
    return parts


def _layer_targets(layer: Layer) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", layer.input_norm.weight
    yield "post_attention_layernorm.weight", layer.mlp_norm.weight
    if layer.q_norm is not None and layer.k_norm is not None:
        yield "self_attn.q_norm.weight", layer.q_norm.weight
        yield "self_attn.k_norm.weight", layer.k_norm.weight
    widths = [heads * layer.head_dim for heads in layer.heads]
    half = layer.gate_up.weight.shape[0] // 2
    fused = (
        (layer.qkv, widths, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.gate_up, [half, half], ("mlp.gate_proj", "mlp.up_proj")),
        (layer.output, [layer.output.weight.shape[0]], ("self_attn.o_proj",)),
        (layer.down, [layer.down.weight.shape[0]], ("mlp.down_proj",)),
    )
    for linear, sizes, names in fused:
        for name, part in zip(names, torch.split(linear.weight, sizes), strict=True):
            yield f"{name}.weight", part
        if linear.bias is not None:
            for name, part in zip(names, torch.split(linear.bias, sizes), strict=True):
                yield f"{name}.bias", part


def _fill(
    model: Model, tensors: Mapping[str, Callable[[], Tensor]], progress: Progress | None
) -> None:
    parts = targets(model)
    _check_names(parts, tensors, model.config.tie_embeddings)
    for done, (name, part) in enumerate(parts.items(), 1):
        tensor = tensors[name]()
        if tensor.shape != part.shape:
            raise ModelError(
                f"{name} has shape {list(tensor.shape)}, the config says {list(part.shape)}"
            )
        if tensor.dtype not in _WEIGHT_DTYPES:
            raise UnsupportedModelError(f"{name} is {tensor.dtype}: quantised weights")
        part.copy_(tensor)
        if progress:
            progress("weights", done, len(parts))


def _check_names(
    parts: Mapping[str, Tensor], tensors: Mapping[str, Callable[[], Tensor]], tied: bool
) -> None:
    missing = sorted(parts.keys() - tensors.keys())
    extra = sorted(
        name
        for name in tensors.keys() - parts.keys()
        if not name.endswith("rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    )
    if missing or extra:
        raise ModelError(
            f"the checkpoint does not fit the config: {len(missing)} tensors missing"
            f" ({', '.join(missing[:3])}), {len(extra)} unknown ({', '.join(extra[:3])})"
        )


# -- sources ------------------------------------------------------------------------------------


def _read_safetensors(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """A reader for each tensor of all shards. Nothing is read yet."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Callable[[], Tensor]] = {}
    try:
        files = safetensors_files(folder)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    for file in files:
        try:
            shard: Any = safe_open(file, framework="pt")
        except FileNotFoundError as error:
            raise ModelError(f"{file} is missing") from error
        except SafetensorError as error:
            raise ModelError(f"{file} is damaged or no safetensors file") from error
        for name in shard.keys():  # noqa: SIM118 (a shard is not a mapping)
            tensors[name] = partial(shard.get_tensor, name)
    return tensors


# -- dummy weights and the revision -------------------------------------------------------------


def _fill_dummy(model: Model, seed: int) -> None:
    """Fills in random weights. Each has a generator of its own, so the order does not matter."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("norm.weight"):
            parameter.fill_(1.0)
            continue
        generator = torch.Generator(parameter.device)
        generator.manual_seed((seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63)
        parameter.normal_(0.0, DUMMY_STD, generator=generator)


def _revision(model: Model, config: ModelConfig) -> str:
    """Digest of the config and of the first and last rows of every weight (as bfloat16, so that
    precision in memory does not change it)."""
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for name, parameter in model.named_parameters():
        rows = torch.stack((parameter[0].flatten(), parameter[-1].flatten()))
        digest.update(name.encode())
        digest.update(rows.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]
