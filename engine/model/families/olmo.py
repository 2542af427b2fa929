"""OLMo 2 and OLMo 3: norms after attention and feed-forward only, and one over all of q and of k.

In OLMo 3 three of four layers have windows, and may rotate in another way.
"""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig, Norms
from engine.model.families.reading import (
    Family,
    biases,
    decoder,
    kinds,
    layers_alike,
    rope,
    windows,
)
from engine.model.mixers.config import QkNorm

NORMS = Norms(
    before_mixer=None,
    after_mixer="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)


def _read_2(config: Any, _longest: int) -> ModelConfig:
    return _read(config)


def _read_3(config: Any, _longest: int) -> ModelConfig:
    found = kinds(config)
    by_kind = {kind: rope(config, kind) for kind in set(found)}
    return _read(config, rope=tuple(by_kind[kind] for kind in found), window=windows(config))


def _read(config: Any, **by_layer: Any) -> ModelConfig:
    attention: dict[str, Any] = {"qk_norm": QkNorm.WHOLE, **biases(config), **by_layer}
    return decoder(config, layers_alike(config, norms=NORMS, **attention))


FAMILIES = {
    "olmo2": Family("Olmo2ForCausalLM", _read_2),
    "olmo3": Family("Olmo3ForCausalLM", _read_3),
}
