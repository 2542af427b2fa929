"""GLM-4: norms before and after, and rope that turns neighbours in a part of each head. Of
GLM-4.1V, GLM-4.6V and GLM-OCR the text part is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.config import ModelConfig, Norms
from engine.model.families.mixtures import glm4_moe
from engine.model.families.reading import Family, by_text, decoder, gated, layers_alike, rope

NORMS = Norms(after_mixer="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm")


def _read(config: Any, _longest: int) -> ModelConfig:
    return _decoder(config, qkv_bias=bool(config.attention_bias))


def _read_9b(config: Any, _longest: int) -> ModelConfig:
    return _decoder(config, qkv_bias=bool(config.attention_bias), norms=Norms())


def _read_part(config: Any, _longest: int) -> ModelConfig:
    return _decoder(config, qkv_bias=True)


def _read_ocr(config: Any, _longest: int) -> ModelConfig:
    return _decoder(config, qkv_bias=False)


def _decoder(config: Any, qkv_bias: bool, norms: Norms = NORMS) -> ModelConfig:
    layers = layers_alike(
        config,
        gated(config, gate_up=("mlp.gate_up_proj",)),
        norms,
        rope=replace(rope(config, partial=True), neighbours=True),
        qkv_bias=qkv_bias,
    )
    return decoder(config, layers)


_PARTS = {"glm4v_text": _read_part, "glm4v_moe_text": glm4_moe.read}

FAMILIES = {
    "glm": Family("GlmForCausalLM", _read_9b),
    "glm4": Family("Glm4ForCausalLM", _read),
    "glm_ocr": Family(
        "GlmOcrForConditionalGeneration", _read_ocr, has_images=True, drafts="layers"
    ),
    "glm4v": Family("Glm4vForConditionalGeneration", _read_part, has_images=True),
    "glm46v": Family(
        "Glm46VForConditionalGeneration", by_text(_PARTS), has_images=True, drafts="layers"
    ),
}
