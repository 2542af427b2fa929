"""Which models have no fused kernels. It needs no GPU."""

from __future__ import annotations

from engine.model import ModelConfig
from engine.model.config import BesideConfig
from engine.model.mixers.config import AttentionConfig, DeltaConfig, LatentConfig, ShortConvConfig


def obstacle(config: ModelConfig) -> str:
    """Which feature of a model has no fused kernels; empty: none."""
    for layer in dict.fromkeys(config.layers):
        own = layer.mixer
        if isinstance(own, ShortConvConfig):
            return "short convolutions"
        if isinstance(own, DeltaConfig):
            return "linear attention"
        if isinstance(own, AttentionConfig) and own.gated:
            return "attention with gates"
        if isinstance(own, LatentConfig):
            return "attention over latents"
        if own is not None and (own.v_norm or own.v_is_k or own.kv_from is not None):
            return "attention that shares or norms V"
        if isinstance(layer.feed_forward, BesideConfig):
            return "experts beside a feed-forward"
        if layer.parallel:
            return "a feed-forward beside attention"
        if layer.scalar is not None:
            return "a factor on a layer's output"
    if config.norm_centred:
        return "a norm that subtracts the mean"
    return "inputs of layers" if config.layer_inputs is not None else ""
