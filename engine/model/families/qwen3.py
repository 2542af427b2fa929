"""Qwen3: a norm over each head of q and k. Qwen3-MoE has experts in most layers."""

from __future__ import annotations

from typing import Any

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.families.reading import (
    Family,
    biases,
    decoder,
    layers_alike,
    qwen_experts,
    qwen_routing,
    silu_only,
    windows,
)
from engine.model.mixers.config import QkNorm


def _read(config: Any, _longest: int) -> ModelConfig:
    return _decoder(config)


def _read_experts(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    experts = ExpertsConfig(config.moe_intermediate_size, qwen_routing(config))
    return _decoder(config, qwen_experts(config, experts))


def _decoder(config: Any, feed_forward: Any = None) -> ModelConfig:
    attention: dict[str, Any] = {
        "window": windows(config),
        "qk_norm": QkNorm.HEAD,
        **biases(config),
    }
    return decoder(config, layers_alike(config, feed_forward, **attention))


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", _read),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _read_experts),
}
