"""Qwen3: a norm over each head of q and k."""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig, QkNorm
from engine.model.families.reading import Family, decoder, layers_alike, windows


def _read(config: Any, _longest: int) -> ModelConfig:
    bias = bool(config.attention_bias)
    layers = layers_alike(config, window=windows(config))
    return decoder(config, layers, qk_norm=QkNorm.HEAD, qkv_bias=bias, output_bias=bias)


FAMILIES = {"qwen3": Family("Qwen3ForCausalLM", _read)}
