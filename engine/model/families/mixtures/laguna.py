"""Laguna and Trinity (AFMoE): gates of a product of their own on what heads have read, norms of q
and k, windows, and experts beside a shared one, which are chosen by sigmoids with a bias. Layers of
Laguna differ in query heads; of Trinity those that see all tokens are not rotated."""

from __future__ import annotations

from typing import Any

from engine.model.config import (
    ExpertsConfig,
    FeedForwardConfig,
    ModelConfig,
    ModelError,
    Norms,
    UnsupportedModelError,
)
from engine.model.experts.config import ExpertNames
from engine.model.families.reading import (
    SLIDING,
    Family,
    biases,
    by_forward,
    decoder,
    gated,
    kinds,
    layers_alike,
    rope,
    shared_experts,
    sigmoid_routing,
    silu_only,
    windows,
)
from engine.model.mixers.config import OutputGate, QkNorm

LAGUNA = ExpertNames(bias="mlp.experts.e_score_correction_bias")
SHARED = "mlp.shared_expert"
AFMOE = ExpertNames(router="mlp.router.gate", bias="mlp.expert_bias")
AFMOE_NORMS = Norms(
    after_mixer="post_attention_layernorm",
    before_feed_forward="pre_mlp_layernorm",
    after_feed_forward="post_mlp_layernorm",
)


def _read_laguna(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    if config.moe_router_logit_softcapping:
        raise UnsupportedModelError(
            "moe_router_logit_softcapping: logits of routers are not capped"
        )
    if config.gating not in (True, "per-head", "per-element"):
        raise UnsupportedModelError(f"gating {config.gating}")
    found, heads = kinds(config), tuple(map(int, config.num_attention_heads_per_layer))
    if len(heads) != len(found) or len(config.mlp_layer_types) != len(found):
        raise ModelError("heads or feed-forwards are not stated for each layer")
    factor = float(config.moe_routed_scaling_factor)
    shared = gated(
        config,
        width=config.shared_expert_intermediate_size,
        gate_up=(f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
        down=f"{SHARED}.down_proj",
    )
    experts = ExpertsConfig(
        config.moe_intermediate_size,
        sigmoid_routing(config.num_experts, config.num_experts_per_tok, factor=factor),
        shared=shared,
        names=LAGUNA,
    )
    ropes = {kind: rope(config, kind, partial=True) for kind in set(found)}
    layers = layers_alike(
        config,
        by_forward(config, experts),
        heads=heads,
        rope=tuple(ropes[kind] for kind in found),
        window=windows(config),
        qk_norm=QkNorm.HEAD,
        gate=OutputGate("g_proj", by_head=config.gating != "per-element", softplus=True),
        **biases(config),
    )
    return decoder(config, layers)


def _read_afmoe(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    found, turned = kinds(config), rope(config)
    experts = ExpertsConfig(
        config.moe_intermediate_size,
        sigmoid_routing(
            config.num_experts, config.num_experts_per_tok, factor=float(config.route_scale)
        ),
        shared=shared_experts(config, config.num_shared_experts),
        names=AFMOE,
    )
    plain = int(config.num_dense_layers or 0)
    forwards: tuple[FeedForwardConfig, ...] = tuple(
        experts if index >= plain else gated(config) for index in range(len(found))
    )
    layers = layers_alike(
        config,
        forwards,
        AFMOE_NORMS,
        rope=tuple(turned if kind == SLIDING else None for kind in found),
        window=windows(config),
        qk_norm=QkNorm.HEAD,
        gate=OutputGate("gate_proj"),
        **biases(config),
    )
    scale = float(config.hidden_size) ** 0.5 if config.mup_enabled else 1.0
    return decoder(config, layers, embedding_scale=scale)


FAMILIES = {
    "laguna": Family("LagunaForCausalLM", _read_laguna),
    "afmoe": Family("AfmoeForCausalLM", _read_afmoe),
}
