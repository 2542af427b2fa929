"""Llama, and what has its architecture, such as SmolLM2. SmolLM3 leaves rope out in some layers,
Granite has four multipliers, and Seed-OSS biases of q, k and v alone."""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig
from engine.model.families.reading import Family, biases, decoder, layers_alike, rope, windows


def _read(config: Any, _longest: int) -> ModelConfig:
    return decoder(config, layers_alike(config, **biases(config)))


def _read_smol_3(config: Any, _longest: int) -> ModelConfig:
    rotation = rope(config)
    ropes = tuple(rotation if rotates else None for rotates in config.no_rope_layers)
    window = windows(config) if config.use_sliding_window else None
    return decoder(config, layers_alike(config, rope=ropes, window=window, **biases(config)))


def _read_granite(config: Any, _longest: int) -> ModelConfig:
    scale = float(config.attention_multiplier)
    return decoder(
        config,
        layers_alike(config, scale=scale, **biases(config)),
        embedding_scale=float(config.embedding_multiplier),
        residual_scale=float(config.residual_multiplier),
        logits_scale=1.0 / config.logits_scaling,
    )


def _read_seed(config: Any, _longest: int) -> ModelConfig:
    bias = {"qkv_bias": config.attention_bias, "output_bias": config.attention_out_bias}
    return decoder(config, layers_alike(config, **bias))


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _read),
    "granite": Family("GraniteForCausalLM", _read_granite),
    "seed_oss": Family("SeedOssForCausalLM", _read_seed),
    "smollm3": Family("SmolLM3ForCausalLM", _read_smol_3),
}
