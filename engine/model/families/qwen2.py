"""Qwen2 and Qwen2.5: q, k and v have biases, and later layers may have windows. Qwen2-MoE has
experts and a shared one, whose output has a gate. Qwen2-VL and Qwen2.5-VL are read as Qwen2: they
rotate by three positions, which are one and the same where there is no image."""

from __future__ import annotations

from typing import Any

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.families.reading import (
    Family,
    decoder,
    gated,
    layers_alike,
    qwen_experts,
    qwen_routing,
    silu_only,
    windows,
)


def _read(config: Any, _longest: int) -> ModelConfig:
    return decoder(config, layers_alike(config, window=windows(config), qkv_bias=True))


def _read_experts(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    shared = gated(
        config,
        width=config.shared_expert_intermediate_size,
        gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        down="mlp.shared_expert.down_proj",
    )
    routing = qwen_routing(config)
    experts = ExpertsConfig(
        config.moe_intermediate_size, routing, shared=shared, shared_gate="mlp.shared_expert_gate"
    )
    attention: dict[str, Any] = {"window": windows(config), "qkv_bias": bool(config.qkv_bias)}
    return decoder(config, layers_alike(config, qwen_experts(config, experts), **attention))


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", _read),
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", _read, has_images=True),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", _read, has_images=True),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", _read_experts),
}
