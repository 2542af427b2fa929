"""Qwen3: a norm over each head of q and k. Qwen3-MoE has experts in most layers."""

from __future__ import annotations

from typing import Any

from engine.model.config import ExpertsConfig, ModelConfig, QkNorm
from engine.model.families.reading import (
    Family,
    decoder,
    layers_alike,
    qwen_experts,
    qwen_routing,
    silu_only,
    windows,
)


def _read(config: Any, _longest: int) -> ModelConfig:
    return _decoder(config)


def _read_experts(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    experts = ExpertsConfig(config.moe_intermediate_size, qwen_routing(config))
    return _decoder(config, feed_forward=qwen_experts(config, experts))


def _decoder(config: Any, **features: Any) -> ModelConfig:
    bias = bool(config.attention_bias)
    layers = layers_alike(config, window=windows(config), **features)
    return decoder(config, layers, qk_norm=QkNorm.HEAD, qkv_bias=bias, output_bias=bias)


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", _read),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _read_experts),
}
