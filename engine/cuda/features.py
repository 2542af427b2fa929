"""Which models have no fused kernels. It needs no GPU."""

from __future__ import annotations

from engine.model.config import ExpertsConfig, MlpConfig, ModelConfig
from engine.model.mixers.config import AttentionConfig, DeltaConfig, MambaConfig


def obstacle(config: ModelConfig) -> str:
    """Which feature of a model has no fused kernels; empty: none."""
    for layer in dict.fromkeys(config.layers):
        own, forward = layer.mixer, layer.feed_forward
        squares = isinstance(forward, ExpertsConfig) and forward.gate.squared
        if squares or isinstance(forward, MlpConfig):
            return "a feed-forward without a gate"
        if isinstance(own, DeltaConfig):
            return "linear attention"
        if isinstance(own, MambaConfig):
            return "Mamba"
        if isinstance(own, AttentionConfig) and own.gated:
            return "attention with gates"
    return ""
