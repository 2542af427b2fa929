"""dots.llm1: the attention of Qwen3 and the experts of DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig
from engine.model.families.reading import (
    Family,
    biases,
    decoder,
    deepseek_experts,
    layers_alike,
    windows,
)
from engine.model.mixers.config import QkNorm


def _read(config: Any, _longest: int) -> ModelConfig:
    attention: dict[str, Any] = {"window": windows(config), "qk_norm": QkNorm.HEAD}
    layers = layers_alike(config, deepseek_experts(config), **attention, **biases(config))
    return decoder(config, layers)


FAMILIES = {"dots1": Family("Dots1ForCausalLM", _read)}
