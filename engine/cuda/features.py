"""Which models have no fused kernels. It needs no GPU."""

from __future__ import annotations

from typing import Final

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.mixers.config import AttentionConfig, DeltaConfig, MambaConfig

MOST_NUMBERS: Final = 32768
"""The most in the matrix of a head: a program has one in its registers."""


def obstacle(config: ModelConfig) -> str:
    """Which feature of a model has no fused kernels; empty: none."""
    for layer in dict.fromkeys(config.layers):
        own, forward = layer.mixer, layer.feed_forward
        if isinstance(forward, ExpertsConfig) and (forward.gate.squared or forward.reduced):
            return "an expert without a gate"
        if isinstance(own, AttentionConfig) and own.gate is not None:
            return "a gate on attention with a product of its own"
        if isinstance(own, AttentionConfig) and own.norm_behind:
            return "norms of q and k behind rope"
        if isinstance(own, DeltaConfig):
            numbers = own.key_dim * own.value_dim
        elif isinstance(own, MambaConfig):
            numbers = own.state_dim * own.head_dim
        else:
            continue
        if numbers > MOST_NUMBERS:
            return f"a state of {numbers} numbers a head"
    return ""
