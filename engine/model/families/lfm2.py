"""LFM2: short convolutions, and attention in some layers."""

from __future__ import annotations

from typing import Any

from engine.model.config import GatedConfig, LayerConfig, ModelConfig, ModelError, Norms
from engine.model.families.reading import FULL, Family, decoder, layers_alike
from engine.model.mixers.config import QkNorm, ShortConvConfig

CONV = "conv"
NORMS = Norms(before_mixer="operator_norm", before_feed_forward="ffn_norm")
MOST_BLOCKS = 16
"""Parts in which ranks divide the channels: as many as ranks may be, and few enough to be wide."""
KERNELS = range(2, 9)


def _read(config: Any, _longest: int) -> ModelConfig:
    kinds = list(config.layer_types)
    if len(kinds) != config.num_hidden_layers or set(kinds) - {FULL, CONV} or FULL not in kinds:
        raise ModelError(f"layer_types are {', '.join(sorted(set(kinds)))}, {len(kinds)} in all")
    attention = layers_alike(
        config,
        _feed_forward(config),
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


def _feed_forward(config: Any) -> GatedConfig:
    width = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        width = int(2 * width / 3)
        if config.block_ffn_dim_multiplier is not None:
            multiple = int(config.block_multiple_of)
            width = int(config.block_ffn_dim_multiplier * width)
            width = multiple * -(-width // multiple)
    return GatedConfig(
        width, gate_up=("feed_forward.w1", "feed_forward.w3"), down="feed_forward.w2"
    )


FAMILIES = {"lfm2": Family("Lfm2ForCausalLM", _read, by_layer=True)}
