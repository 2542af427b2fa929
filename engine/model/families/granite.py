"""Granite: a Llama with four multipliers."""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig
from engine.model.families.reading import Family, biases, decoder, layers_alike


def _read(config: Any, _longest: int) -> ModelConfig:
    scale = float(config.attention_multiplier)
    return decoder(
        config,
        layers_alike(config, scale=scale, **biases(config)),
        embedding_scale=float(config.embedding_multiplier),
        residual_scale=float(config.residual_multiplier),
        logits_scale=1.0 / config.logits_scaling,
    )


FAMILIES = {"granite": Family("GraniteForCausalLM", _read)}
