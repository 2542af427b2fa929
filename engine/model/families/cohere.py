"""Cohere 2 (Command): norms subtract the mean, and attention and feed-forward read the same. Layers
with windows rotate neighbours, and those that see all tokens rotate nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.config import ModelConfig, Norms
from engine.model.families.reading import (
    Family,
    biases,
    decoder,
    layers_alike,
    rope,
    windows,
)


def _read(config: Any, _longest: int) -> ModelConfig:
    turned, seen = replace(rope(config), neighbours=True), windows(config)
    ropes = tuple(None if window is None else turned for window in seen)
    norms = Norms(before_feed_forward=None)
    layers = layers_alike(config, norms=norms, rope=ropes, window=seen, **biases(config))
    return decoder(
        config,
        [replace(layer, parallel=True) for layer in layers],
        norm_eps=config.layer_norm_eps,
        norm_centred=True,
        logits_scale=float(config.logit_scale),
    )


FAMILIES = {"cohere2": Family("Cohere2ForCausalLM", _read)}
