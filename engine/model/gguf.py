"""GGUF files: a llama.cpp checkpoint with config and tensors in one mapped file.

The header becomes the config that a Hugging Face folder of the same model would hold, so that both
pass the same checks. Tensors are dequantised one at a time, on demand. Unsupported rope settings in
the header are refused, because a slightly wrong rotation still yields fluent text.

Keys and names follow the GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.gguf_header import CheckpointError, read_gguf
from engine.model.config import LayerConfig, ModelConfig, ModelError, UnsupportedModelError
from engine.model.families import build_config
from engine.model.families.sense import check_stated
from engine.model.mixers.config import AttentionConfig
from engine.model.region import Range
from engine.model.sources import Header, WholeTensors

SUPPORTED_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Names of architectures in GGUF. A Mistral is a llama there."""

_SETTINGS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_ROPE_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
"""Tensor of [D / 2] divisors of the frequencies, which stores llama3's scaling."""


class GgufFile:
    """A GGUF file. It stays mapped while this object or a reader of it lives."""

    def __init__(self, path: Path) -> None:
        """Maps a file.

        Raises:
            ModelError: it is not a readable GGUF file.
        """
        try:
            reader = read_gguf(path)
        except (OSError, CheckpointError) as error:
            raise ModelError(f"{path} is not a readable GGUF file") from error
        self._path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        self._whole = WholeTensors()

    def config(self, max_context_tokens: int = 0) -> ModelConfig:
        """The header as a model config. `max_context_tokens`: see `read_config`.

        Raises:
            UnsupportedModelError: the engine does not support the model.
            ModelError: the header lacks a value that every model has.
        """
        from transformers import AutoConfig

        architecture = self._get("general.architecture")
        if architecture not in SUPPORTED_GGUF_ARCHITECTURES:
            raise UnsupportedModelError(
                f"GGUF architecture {architecture} is not supported; supported are"
                f" {', '.join(SUPPORTED_GGUF_ARCHITECTURES)}"
            )
        settings = self._settings(architecture)
        window = self._get(f"{architecture}.attention.sliding_window")
        if window and architecture != "llama":
            raise UnsupportedModelError(f"GGUF {architecture} with a sliding window")
        model_type = "mistral" if window else architecture
        check_stated({"model_type": f"GGUF {architecture}", **settings})
        try:
            hf = AutoConfig.for_model(model_type, sliding_window=window or None, **settings)
        except Exception as error:  # See `read_config`.
            raise ModelError(f"GGUF {architecture}: {self._path} has no valid header") from error
        ends = (self._get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot"))
        eos_token_ids = tuple(sorted({int(end) for end in ends if end is not None}))
        config = build_config(model_type, hf, eos_token_ids, max_context_tokens)
        if _ROPE_FACTORS not in self._tensors:
            return config
        divisors = self._read(_ROPE_FACTORS).tolist()
        return replace(config, layers=tuple(_divided(each, divisors) for each in config.layers))

    @property
    def headers(self) -> dict[str, Header]:
        """See `engine.model.sources.Source`. Tensors are dequantised to float32."""
        names = self._tensors.keys() - {_ROPE_FACTORS}
        return {
            _hugging_face_name(name): Header(self._shape(name), torch.float32) for name in names
        }

    def read(self, name: str, *where: Range) -> Tensor:
        """See `engine.model.sources.Source`. A tensor is dequantised whole and then cut."""
        return self._whole.cut(name, where, self._dequantised)

    def _dequantised(self, name: str) -> Tensor:
        own = self._own_names[name]
        kind = own.split(".")[2] if own.startswith("blk.") else ""
        return self._read(own, self._rotated_heads.get(kind, 0))

    @cached_property
    def _own_names(self) -> dict[str, str]:
        return {_hugging_face_name(name): name for name in self._tensors.keys() - {_ROPE_FACTORS}}

    @cached_property
    def _rotated_heads(self) -> dict[str, int]:
        """Heads of the tensors whose rows have another order than Hugging Face's."""
        architecture = self._get("general.architecture")
        if architecture != "llama":
            return {}
        heads = self._get("llama.attention.head_count")
        return {"attn_q": heads, "attn_k": self._get("llama.attention.head_count_kv", heads)}

    def _settings(self, architecture: str) -> dict[str, Any]:
        prefix = f"{architecture}."
        settings: dict[str, Any] = {}
        for key, setting in _SETTINGS.items():
            settings[setting] = self._get(prefix + key)
            if not isinstance(settings[setting], int | float):
                raise ModelError(f"{self._path}: {prefix}{key} is missing or not one number")
            if settings[setting] <= 0:
                raise ModelError(f"{self._path}: {prefix}{key} is {settings[setting]}")
        heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
        head_dim = self._get(f"{prefix}attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._get(prefix + key, head_dim) != head_dim:
                raise UnsupportedModelError(f"{prefix}{key} differs from the head dimension")
        biased = "blk.0.attn_output.bias" in self._tensors
        return settings | {
            "head_dim": head_dim,
            "num_key_value_heads": self._get(f"{prefix}attention.head_count_kv", heads),
            "vocab_size": int(self._shape("token_embd.weight")[0]),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": biased,
            "mlp_bias": "blk.0.ffn_down.bias" in self._tensors,
            "rope_parameters": self._rope(prefix),
        }

    def _rope(self, prefix: str) -> dict[str, Any]:
        rope = {"rope_theta": self._get(f"{prefix}rope.freq_base", 10000.0)}
        scaling = f"{prefix}rope.scaling."
        given = {k.removeprefix(scaling): self._get(k) for k in self._fields if scaling in k}
        if linear := self._get(f"{prefix}rope.scale_linear"):
            given = {"type": "linear", "factor": linear} | given
        kind = given.setdefault("type", "none")
        given.pop("finetuned", None)
        if kind == "none":
            return rope | {"rope_type": "default"}
        if kind not in ("linear", "yarn") or not given.keys() <= _ROPE_SCALING.keys():
            raise UnsupportedModelError(
                f"GGUF rope scaling {kind} with {', '.join(sorted(given))} is not supported"
            )
        return rope | {_ROPE_SCALING[key]: value for key, value in given.items()}

    def _get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise ModelError(f"{self._path} has no {name}")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def _read(self, name: str, heads: int = 0) -> Tensor:
        """Reads and dequantises a tensor. With `heads`, restores the row order of Hugging Face."""
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{name} is quantised as {tensor.tensor_type.name}, which cannot be read"
            ) from error
        weight = torch.from_numpy(np.require(values, requirements="W"))
        return _stack_halves(weight, heads) if heads else weight


def _hugging_face_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match name.split("."):
        case ["blk", layer, kind, suffix] if kind in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.{suffix}"
    return name


def _divided(layer: LayerConfig, divisors: list[float]) -> LayerConfig:
    mixer = layer.mixer
    if not isinstance(mixer, AttentionConfig) or mixer.rope is None:
        return layer
    pairs = zip(mixer.rope.frequencies, divisors, strict=True)
    rope = replace(mixer.rope, frequencies=tuple(f / divisor for f, divisor in pairs))
    return replace(layer, mixer=replace(mixer, rope=rope))


def _stack_halves(weight: Tensor, heads: int) -> Tensor:
    """Llama's GGUF interleaves the two halves that rope rotates; Hugging Face stacks them."""
    rows = weight.shape[0]
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
