"""Phi-3 and Phi-4: q, k and v are one tensor in checkpoints, and so are gate and up.

Phi-4-mini rotates a part of each head.
"""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig
from engine.model.families.reading import Family, decoder, gated, layers_alike, rope, windows


def _read(config: Any, longest: int) -> ModelConfig:
    layers = layers_alike(
        config,
        rope=rope(config, partial=True, longest=longest),
        feed_forward=gated(config, gate_up=("mlp.gate_up_proj",)),
        window=windows(config),
        qkv=("qkv_proj",),
    )
    return decoder(config, layers)


FAMILIES = {"phi3": Family("Phi3ForCausalLM", _read)}
