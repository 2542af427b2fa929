"""Qwen2 and Qwen2.5: q, k and v have biases, and later layers may have windows."""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig
from engine.model.families.reading import Family, decoder, layers_alike, windows


def _read(config: Any, _longest: int) -> ModelConfig:
    return decoder(config, layers_alike(config, window=windows(config)), qkv_bias=True)


FAMILIES = {"qwen2": Family("Qwen2ForCausalLM", _read)}
