"""Llama, and what has its architecture, such as SmolLM2. SmolLM3 leaves rope out in some layers."""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig
from engine.model.families.reading import Family, decoder, layers_alike, rope, windows


def _read(config: Any, _longest: int) -> ModelConfig:
    bias = bool(config.attention_bias)
    return decoder(config, layers_alike(config), qkv_bias=bias, output_bias=bias)


def _read_smol_3(config: Any, _longest: int) -> ModelConfig:
    bias, rotation = bool(config.attention_bias), rope(config)
    ropes = tuple(rotation if rotates else None for rotates in config.no_rope_layers)
    window = windows(config) if config.use_sliding_window else None
    layers = layers_alike(config, rope=ropes, window=window)
    return decoder(config, layers, qkv_bias=bias, output_bias=bias)


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _read),
    "smollm3": Family("SmolLM3ForCausalLM", _read_smol_3),
}
