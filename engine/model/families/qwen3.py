"""Qwen3: a norm over each head of q and k. Qwen3-MoE has experts in most layers. Qwen3-VL is read
as these, but that a tensor holds all experts of a layer (see `qwen2.py`)."""

from __future__ import annotations

from typing import Any

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.experts.config import USUAL_NAMES, ExpertNames
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

STACKED = ExpertNames(stacked=True, behind=True)


def _read(config: Any, _longest: int) -> ModelConfig:
    return _decoder(config)


def _read_experts(config: Any, _longest: int) -> ModelConfig:
    return _mixture(config, USUAL_NAMES)


def _read_image_experts(config: Any, _longest: int) -> ModelConfig:
    return _mixture(config, STACKED)


def _mixture(config: Any, names: ExpertNames) -> ModelConfig:
    silu_only(config)
    experts = ExpertsConfig(config.moe_intermediate_size, qwen_routing(config), names=names)
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
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", _read, has_images=True),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration", _read_image_experts, has_images=True
    ),
}
