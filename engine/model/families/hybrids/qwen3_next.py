"""Qwen3-Next and Qwen3.5: a gated delta rule in three of four layers, and attention with gates in
the fourth. Feed-forwards are dense, or experts with a shared one. Their norms add 1 to weights."""

from __future__ import annotations

from typing import Any

from engine.model.config import (
    ExpertsConfig,
    FeedForwardConfig,
    GatedConfig,
    LayerConfig,
    ModelConfig,
    ModelError,
    UnsupportedModelError,
)
from engine.model.experts.config import USUAL_NAMES, ExpertNames
from engine.model.families.reading import (
    FULL,
    Family,
    biases,
    decoder,
    gated,
    layers_alike,
    qwen_experts,
    qwen_routing,
    rope,
    silu_only,
)
from engine.model.mixers.config import DeltaConfig, QkNorm

LINEAR = "linear_attention"
STACKED = ExpertNames(stacked=True, behind=True, straight=True)
"""As Qwen3.5 was published. Who quantises it writes the tensors of each expert by itself."""


def _read_next(config: Any, _longest: int) -> ModelConfig:
    feed_forward = qwen_experts(config, _experts(config, USUAL_NAMES))
    return _read(config, feed_forward, by_head=True)


def _read_dense(config: Any, _longest: int) -> ModelConfig:
    return _read(config, gated(config))


def _read_experts(config: Any, _longest: int) -> ModelConfig:
    return _read(config, _experts(config, STACKED))


def _read(
    config: Any,
    feed_forward: FeedForwardConfig | tuple[FeedForwardConfig, ...],
    *,
    by_head: bool = False,
) -> ModelConfig:
    kinds = list(config.layer_types)
    if len(kinds) != config.num_hidden_layers or set(kinds) - {FULL, LINEAR} or FULL not in kinds:
        raise ModelError(f"layer_types are {', '.join(sorted(set(kinds)))}, {len(kinds)} in all")
    attention = layers_alike(
        config,
        feed_forward,
        qk_norm=QkNorm.HEAD,
        gated=True,
        rope=rope(config, partial=True),
        **biases(config),
    )
    delta = _delta(config, by_head=by_head)
    layers = [
        layer if kind == FULL else LayerConfig(delta, layer.feed_forward)
        for layer, kind in zip(attention, kinds, strict=True)
    ]
    return decoder(config, layers, norm_plus_one=True)


def _delta(config: Any, *, by_head: bool) -> DeltaConfig:
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"linear attention with the activation {config.hidden_act} is not supported; silu is"
        )
    return DeltaConfig(
        key_heads=int(config.linear_num_key_heads),
        value_heads=int(config.linear_num_value_heads),
        key_dim=int(config.linear_key_head_dim),
        value_dim=int(config.linear_value_head_dim),
        kernel=int(config.linear_conv_kernel_dim),
        by_head=by_head,
    )


def _experts(config: Any, names: ExpertNames) -> ExpertsConfig:
    silu_only(config)
    shared = GatedConfig(
        int(config.shared_expert_intermediate_size),
        gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        down="mlp.shared_expert.down_proj",
    )
    return ExpertsConfig(
        config.moe_intermediate_size,
        qwen_routing(config),
        shared=shared,
        shared_gate="mlp.shared_expert_gate",
        names=names,
    )


def _family(architecture: str, read: Any, *, has_images: bool = False) -> Family:
    return Family(architecture, read, by_layer=True, has_images=has_images, drafts="/mtp")


FAMILIES = {
    "qwen3_next": _family("Qwen3NextForCausalLM", _read_next),
    "qwen3_5_text": _family("Qwen3_5ForCausalLM", _read_dense),
    "qwen3_5_moe_text": _family("Qwen3_5MoeForCausalLM", _read_experts),
    "qwen3_5": _family("Qwen3_5ForConditionalGeneration", _read_dense, has_images=True),
    "qwen3_5_moe": _family("Qwen3_5MoeForConditionalGeneration", _read_experts, has_images=True),
}
