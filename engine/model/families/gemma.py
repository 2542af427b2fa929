"""Gemma 2 and Gemma 3: norms before and after, which multiply by 1 + weight.

Gemma 2 caps its logits. Gemma 3 has norms over the heads of q and k instead, and its layers with
windows rotate by another base. Of checkpoints of Gemma 3 that read images the text part is read.
"""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig, Norms, UnsupportedModelError
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
    after_mixer="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)


def _read_2(config: Any, _longest: int) -> ModelConfig:
    return _read(config, rope(config))


def _read_3(config: Any, _longest: int) -> ModelConfig:
    found = kinds(config)
    by_kind = {kind: rope(config, kind) for kind in set(found)}
    return _read(config, tuple(by_kind[kind] for kind in found), qk_norm=QkNorm.HEAD)


def _read(config: Any, ropes: Any, **features: Any) -> ModelConfig:
    if config.use_bidirectional_attention:
        raise UnsupportedModelError("use_bidirectional_attention: attention is causal only")
    layers = layers_alike(
        config,
        rope=ropes,
        scale=config.query_pre_attn_scalar**-0.5,
        window=windows(config),
        soft_cap=config.attn_logit_softcapping,
        norms=NORMS,
        **biases(config),
        **features,
    )
    return decoder(
        config,
        layers,
        norm_plus_one=True,
        embedding_scale=config.hidden_size**0.5,
        logits_soft_cap=config.final_logit_softcapping,
    )


FAMILIES = {
    "gemma2": Family("Gemma2ForCausalLM", _read_2),
    "gemma3_text": Family("Gemma3ForCausalLM", _read_3),
    "gemma3": Family("Gemma3ForConditionalGeneration", _read_3, has_images=True),
}
