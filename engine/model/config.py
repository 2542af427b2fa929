"""What a model is made of, read from its Hugging Face config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("baton.engine")

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on the length of the sequence."""


class ModelError(Exception):
    """The model cannot be loaded or run; the message says why."""


class UnsupportedModelError(ModelError):
    """The architecture, or an option of it, is not one that the engine computes."""


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
    """[head_dim / 2] inverse frequencies, scaling included."""
    rope_scale: float
    """Factor on cos and sin (yarn)."""
    windows: tuple[int | None, ...]
    """Per layer: tokens that a position attends to, itself included; None: all before it."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMS norm over each head of q and k, before rope."""
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]


def read_config(folder: Path, gguf_file: str | None = None) -> ModelConfig:
    """Reads `config.json` and `generation_config.json` of a folder, or a GGUF file's header.

    Raises:
        UnsupportedModelError: not a model that the engine computes.
        ModelError: no readable config.
    """
    from transformers import AutoConfig

    try:
        options = {"gguf_file": gguf_file} if gguf_file else {}
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder} holds no config that can be read") from error
    return from_transformers(config, _eos_token_ids(config, folder))


def from_transformers(config: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Takes over a transformers config.

    Raises:
        UnsupportedModelError: it asks for something that the engine does not compute.
    """
    architecture = _architecture(config)
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
        windows=_windows(config),
        qkv_bias=qwen2 or attention_bias,
        output_bias=attention_bias and not qwen2,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=qwen3,
        tie_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=eos_token_ids,
    )


def _architecture(config: Any) -> str:
    names = config.architectures or [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise UnsupportedModelError(
        f"architecture {', '.join(names)} is not supported;"
        f" supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_options(config: Any) -> None:
    """Options that change the result and are not computed must not pass in silence."""
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError("quantised checkpoints are not supported")
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(f"activation {config.hidden_act} is not supported; silu is")
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        raise UnsupportedModelError("pretraining_tp other than 1 is not supported")


def _rope(config: Any) -> tuple[tuple[float, ...], float]:
    """Inverse frequencies and the factor on cos and sin; transformers computes scaled ones."""
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


def _windows(config: Any) -> tuple[int | None, ...]:
    layers, window = int(config.num_hidden_layers), getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return (None,) * layers
    kinds: list[str] = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    size = int(window)
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _eos_token_ids(config: Any, folder: Path) -> tuple[int, ...]:
    """From the config and the generation config: either may hold one id or a list."""
    from transformers import GenerationConfig

    found = [config.eos_token_id]
    try:
        found.append(GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id)
    except OSError:
        log.debug("%s has no generation config", folder)
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
