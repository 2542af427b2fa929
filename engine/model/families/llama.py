"""Llama, and what has its architecture, such as SmolLM2."""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig
from engine.model.families.reading import Family, decoder, layers_alike


def _read(config: Any, _longest: int) -> ModelConfig:
    bias = bool(config.attention_bias)
    return decoder(config, layers_alike(config), qkv_bias=bias, output_bias=bias)


FAMILIES = {"llama": Family("LlamaForCausalLM", _read)}
