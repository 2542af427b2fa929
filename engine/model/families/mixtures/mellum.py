"""Mellum 2: the attention and the experts of Qwen3, and windows with a rope of their own."""

from __future__ import annotations

from typing import Any

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.families.reading import (
    Family,
    biases,
    by_forward,
    decoder,
    kinds,
    layers_alike,
    qwen_routing,
    rope,
    silu_only,
    windows,
)
from engine.model.mixers.config import QkNorm


def _read(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    found = kinds(config)
    ropes = {kind: rope(config, kind) for kind in set(found)}
    experts = ExpertsConfig(config.moe_intermediate_size, qwen_routing(config))
    layers = layers_alike(
        config,
        by_forward(config, experts),
        qk_norm=QkNorm.HEAD,
        rope=tuple(ropes[kind] for kind in found),
        window=windows(config),
        **biases(config),
    )
    return decoder(config, layers)


FAMILIES = {"mellum": Family("MellumForCausalLM", _read, drafts="/mtp")}
