"""LFM2 and LFM2-MoE: short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any

from engine.model.config import (
    ExpertsConfig,
    GatedConfig,
    LayerConfig,
    ModelConfig,
    ModelError,
    Norms,
)
from engine.model.experts.config import ExpertNames
from engine.model.families.reading import (
    FULL,
    Family,
    by_text,
    decoder,
    layers_alike,
    sigmoid_routing,
)
from engine.model.mixers.config import QkNorm, ShortConvConfig

CONV = "conv"
NORMS = Norms(before_mixer="operator_norm", before_feed_forward="ffn_norm")
MOST_BLOCKS = 16
"""Parts in which ranks divide the channels: as many as ranks may be, and few enough to be wide."""
KERNELS = range(2, 9)
NAMES = ExpertNames(
    router="feed_forward.gate",
    experts="feed_forward.experts",
    gate="w1",
    up="w3",
    down="w2",
    bias="feed_forward.expert_bias",
)


def _read_dense(config: Any, _longest: int) -> ModelConfig:
    width = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        width = int(2 * width / 3)
        if config.block_ffn_dim_multiplier is not None:
            multiple = int(config.block_multiple_of)
            width = int(config.block_ffn_dim_multiplier * width)
            width = multiple * -(-width // multiple)
    return _read(config, _gated(width))


def _read_experts(config: Any, _longest: int) -> ModelConfig:
    how = sigmoid_routing(
        config.num_experts,
        config.num_experts_per_tok,
        normalised=bool(config.norm_topk_prob),
        factor=float(config.routed_scaling_factor),
        bias=bool(config.use_expert_bias),
    )
    experts = ExpertsConfig(config.moe_intermediate_size, how, names=NAMES)
    plain, layers = config.num_dense_layers, range(int(config.num_hidden_layers))
    dense = _gated(int(config.intermediate_size))
    return _read(config, tuple(dense if index < plain else experts for index in layers))


def _read(config: Any, feed_forward: Any) -> ModelConfig:
    kinds = list(config.layer_types)
    if len(kinds) != config.num_hidden_layers or set(kinds) - {FULL, CONV} or FULL not in kinds:
        raise ModelError(f"layer_types are {', '.join(sorted(set(kinds)))}, {len(kinds)} in all")
    attention = layers_alike(
        config,
        feed_forward,
        NORMS,
        qk_norm=QkNorm.HEAD,
        q_norm="q_layernorm",
        k_norm="k_layernorm",
        output="out_proj",
    )
    conv = _conv(config)
    layers = [
        layer if kind == FULL else LayerConfig(conv, layer.feed_forward, NORMS)
        for layer, kind in zip(attention, kinds, strict=True)
    ]
    return decoder(config, layers, last_norm="embedding_norm")


def _conv(config: Any) -> ShortConvConfig:
    kernel, channels = int(config.conv_L_cache), int(config.hidden_size)
    if kernel not in KERNELS:
        raise ModelError(f"conv_L_cache is {kernel}; it can be 2 to {KERNELS[-1]}")
    if channels % 2:
        raise ModelError(f"the hidden size is {channels}, which is odd")
    blocks = max(n for n in range(1, MOST_BLOCKS + 1) if channels % (2 * n) == 0)
    return ShortConvConfig(channels, kernel, blocks, bool(config.conv_bias))


def _gated(width: int) -> GatedConfig:
    names = "feed_forward.w1", "feed_forward.w3"
    return GatedConfig(width, gate_up=names, down="feed_forward.w2")


FAMILIES = {
    "lfm2": Family("Lfm2ForCausalLM", _read_dense, by_layer=True),
    "lfm2_vl": Family(
        "Lfm2VlForConditionalGeneration",
        by_text({"lfm2": _read_dense, "lfm2_moe": _read_experts}),
        by_layer=True,
        has_images=True,
    ),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", _read_experts, by_layer=True),
}
