"""Gemma 4: a Gemma 3 whose layers differ. Those that see all tokens have larger heads, and perhaps
fewer KV heads, whose V is their K before its norm. The last layers may read K and V of earlier
ones. Of checkpoints that read images and sound the text part is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.config import (
    Activation,
    BesideConfig,
    ExpertsConfig,
    FeedForwardConfig,
    LayerConfig,
    LayerInputs,
    ModelConfig,
    ModelError,
    Norms,
    UnsupportedModelError,
)
from engine.model.experts.config import ExpertNames, Gate
from engine.model.families.gemma import NORMS
from engine.model.families.reading import (
    FULL,
    Family,
    activation,
    biases,
    by_text,
    decoder,
    gated,
    kinds,
    rope,
    routing,
)
from engine.model.mixers.config import AttentionConfig, QkNorm
from engine.model.mixers.rope import Rope

NAMES = ExpertNames(router="router.proj", experts="experts", stacked=True, straight=True)


def _read(config: Any, _longest: int) -> ModelConfig:
    if config.use_bidirectional_attention == "all":
        raise UnsupportedModelError("use_bidirectional_attention: attention is causal only")
    found = kinds(config)
    ropes = {kind: rope(config.per_layer_config[kind], kind, partial=True) for kind in set(found)}
    layers = [
        LayerConfig(
            _attention(config, index, ropes[kind]),
            *_forward(config, index),
            scalar="layer_scalar",
        )
        for index, kind in enumerate(found)
    ]
    width, inputs = getattr(config, "hidden_size_per_layer_input", 0), None
    if width:
        act = activation(config.hidden_activation)
        inputs = LayerInputs(width, config.vocab_size_per_layer_input, act)
    return decoder(
        config,
        layers,
        layer_inputs=inputs,
        embedding_scale=config.hidden_size**0.5,
        logits_soft_cap=config.final_logit_softcapping,
    )


def _attention(config: Any, index: int, turned: Rope) -> AttentionConfig:
    kind, modes = config.layer_types[index], config.kv_sharing_modes
    own = config.per_layer_config[index]
    lender = None
    if modes[index] == "reuse":
        alike = (at for at in range(index) if config.layer_types[at] == kind)
        lender = next((at for at in alike if modes[at] == "store"), None)
        if lender is None:
            raise ModelError(f"layer {index} reads K and V of a layer before it, and none has any")
    return AttentionConfig(
        config.num_attention_heads,
        own.num_key_value_heads,
        own.head_dim,
        turned,
        scale=1.0,
        window=None if kind == FULL else int(config.sliding_window),
        qk_norm=QkNorm.HEAD,
        v_norm=True,
        v_is_k=bool(config.attention_k_eq_v) and kind == FULL,
        kv_from=lender,
        lends=modes[index] == "store" and "reuse" in modes,
        **biases(config),
    )


def _forward(config: Any, index: int) -> tuple[FeedForwardConfig, Norms]:
    wide = config.use_double_wide_mlp and config.kv_sharing_modes[index] == "reuse"
    plain = gated(config, width=config.intermediate_size * (2 if wide else 1))
    if not getattr(config, "enable_moe_block", False):
        return plain, NORMS
    if plain.activation is not Activation.GELU_TANH:
        raise UnsupportedModelError(f"experts with {config.hidden_activation}")
    how = routing(config.num_experts, config.top_k_experts, normalised=True)
    experts = ExpertsConfig(config.moe_intermediate_size, how, Gate(gelu=True), names=NAMES)
    beside = BesideConfig(
        plain,
        experts,
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm_1",
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_2",
        "router.scale",
        "router.per_expert_scale",
    )
    return beside, replace(NORMS, before_feed_forward=None)


_PARTS = {"gemma4_text": _read, "gemma4_unified_text": _read}

FAMILIES = {
    "gemma4_text": Family("Gemma4ForCausalLM", _read, by_layer=True),
    "gemma4": Family(
        "Gemma4ForConditionalGeneration", by_text(_PARTS), by_layer=True, has_images=True
    ),
    "gemma4_unified": Family(
        "Gemma4UnifiedForConditionalGeneration", by_text(_PARTS), by_layer=True, has_images=True
    ),
}
