"""Which models have no fused kernels. It needs no GPU."""

from __future__ import annotations

from engine.model import ModelConfig
from engine.model.mixers.config import AttentionConfig, DeltaConfig, MambaConfig


def obstacle(config: ModelConfig) -> str:
    """Which feature of a model has no fused kernels; empty: none."""
    for layer in dict.fromkeys(config.layers):
        own = layer.mixer
        if isinstance(own, DeltaConfig):
            return "linear attention"
        if isinstance(own, MambaConfig):
            return "Mamba"
        if isinstance(own, AttentionConfig) and own.gated:
            return "attention with gates"
    return ""
