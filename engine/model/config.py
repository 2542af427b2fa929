"""The shape and options of a model, read from its Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SUPPORTED_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Supported architectures by model type."""
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope types whose frequencies do not depend on the length of the sequence."""


class ModelError(Exception):
    """The model cannot be loaded or run; the message says why."""


class UnsupportedModelError(ModelError):
    """The engine does not support the architecture or one of its options."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    rope_frequencies: tuple[float, ...]
    """[head_dim / 2] inverse frequencies, with scaling."""
    rope_scale: float
    """Factor on cos and sin (yarn)."""
    windows: tuple[int | None, ...]
    """Per layer: number of tokens that a position attends to, with itself; None: all before it."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head of q and k, before rope."""
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]


def read_config(folder: Path) -> ModelConfig:
    """Reads `config.json` and `generation_config.json` of a folder.

    Raises:
        UnsupportedModelError: the engine does not support the model.
        ModelError: there is no readable config.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    stated = read_json(folder / "config.json")
    architecture = _architecture(stated)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"{folder / 'config.json'} is not a valid config") from error
    return build_config(architecture, config, _eos_token_ids(config, folder))


def build_config(architecture: str, config: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Converts a transformers config of a supported architecture.

    Raises:
        UnsupportedModelError: the engine does not support an option of it.
    """
    _refuse_options(config)
    qwen2, qwen3 = architecture.startswith("Qwen2"), architecture.startswith("Qwen3")
    attention_bias = bool(getattr(config, "attention_bias", False))
    frequencies, scale = _rope(config)
    heads = config.num_attention_heads
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_frequencies=frequencies,
        rope_scale=scale,
        windows=_windows(architecture, config),
        qkv_bias=qwen2 or attention_bias,
        output_bias=attention_bias and not qwen2,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=qwen3,
        tie_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=eos_token_ids,
    )


def read_json(file: Path) -> dict[str, Any]:
    """An object from a JSON file beside a model.

    Raises:
        ModelError: there is none.
    """
    if not file.is_file():
        raise ModelError(f"{str(file.parent)!r} is no model: it has no {file.name}")
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} is no config that can be read") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is no config that can be read")
    return content


def _architecture(stated: Mapping[str, Any]) -> str:
    """The architecture. It must agree with the model type, because other models reuse architecture
    names."""
    model_type = stated.get("model_type")
    supported = SUPPORTED_ARCHITECTURES.get(str(model_type))
    names = stated.get("architectures") or [supported or f"of model type {model_type}"]
    if supported is None or supported not in names:
        raise UnsupportedModelError(
            f"architecture {', '.join(names)} (model type {model_type}) is not supported;"
            f" supported are {', '.join(SUPPORTED_ARCHITECTURES.values())}"
        )
    return supported


def _refuse_options(config: Any) -> None:
    """Refuses unsupported options that would change the result."""
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError("quantised checkpoints are not supported")
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation {config.hidden_act} is not supported; silu is")
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        raise UnsupportedModelError("pretraining_tp other than 1 is not supported")


def _rope(config: Any) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies, and the factor on cos and sin. transformers computes scaled ones."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters: Mapping[str, Any] = config.rope_parameters or {}
    kind = parameters.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE_TYPES or parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"rope type {kind} (partial {parameters.get('partial_rotary_factor', 1.0)}) is not"
            f" supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}, not partial"
        )
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return tuple(frequencies.tolist()), float(scale)
    heads = config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0


def _windows(architecture: str, config: Any) -> tuple[int | None, ...]:
    layers, window = int(config.num_hidden_layers), getattr(config, "sliding_window", None)
    if window is None or architecture.startswith("Llama"):
        return (None,) * layers
    kinds: list[str] = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(f"layers of type {', '.join(sorted(unknown))}")
    size = int(window)
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(config: Any, folder: Path) -> tuple[int, ...]:
    """Ids from the config and the generation config. Either may hold one id or a list."""
    file = folder / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    ids: set[int] = set()
    for value in (config.eos_token_id, generation.get("eos_token_id")):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
