"""Hunyuan 3: the attention of Qwen3, and experts beside a shared one, which are chosen by sigmoids
with a bias. Its draft layers are not read."""

from __future__ import annotations

from typing import Any

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.experts.config import ExpertNames
from engine.model.families.reading import (
    Family,
    biases,
    by_forward,
    decoder,
    gated,
    layers_alike,
    sigmoid_routing,
    silu_only,
)
from engine.model.mixers.config import QkNorm

NAMES = ExpertNames(router="mlp.router.gate", bias="mlp.expert_bias")
SHARED = "mlp.shared_mlp"


def _read(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    factor = float(config.router_scaling_factor)
    how = sigmoid_routing(config.num_experts, config.num_experts_per_tok, factor=factor)
    width = config.moe_intermediate_size
    shared = gated(
        config,
        width=width * config.num_shared_experts,
        gate_up=(f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
        down=f"{SHARED}.down_proj",
    )
    experts = ExpertsConfig(width, how, shared=shared, names=NAMES)
    forwards = by_forward(config, experts)
    return decoder(config, layers_alike(config, forwards, qk_norm=QkNorm.HEAD, **biases(config)))


FAMILIES = {"hy_v3": Family("HYV3ForCausalLM", _read, drafts="layers")}
