"""ERNIE 4.5 with experts: rope turns neighbours, and the choice of experts adds a bias to their
softmax. Its draft layers are not read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.config import ExpertsConfig, FeedForwardConfig, ModelConfig, UnsupportedModelError
from engine.model.experts.config import ExpertNames
from engine.model.families.reading import (
    Family,
    decoder,
    gated,
    layers_alike,
    rope,
    routing,
    shared_experts,
    silu_only,
)

NAMES = ExpertNames(bias="mlp.moe_statics.e_score_correction_bias")


def _read(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    if config.use_bias:
        raise UnsupportedModelError("use_bias: a head with a bias is not supported")
    how = routing(config.moe_num_experts, config.moe_k, normalised=True, bias=True)
    shared = shared_experts(config, config.moe_num_shared_experts)
    experts = ExpertsConfig(config.moe_intermediate_size, how, shared=shared, names=NAMES)
    layers = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
    forwards: tuple[FeedForwardConfig, ...] = tuple(
        experts
        if index in layers and (index + 1) % config.moe_layer_interval == 0
        else gated(config)
        for index in range(int(config.num_hidden_layers))
    )
    turned = replace(rope(config), neighbours=True)
    return decoder(config, layers_alike(config, forwards, rope=turned))


def _read_dense(config: Any, _longest: int) -> ModelConfig:
    turned, bias = replace(rope(config), neighbours=True), bool(config.use_bias)
    forward = gated(config, bias=bias)
    layers = layers_alike(config, forward, rope=turned, qkv_bias=bias, output_bias=bias)
    return decoder(config, layers)


FAMILIES = {
    "ernie4_5": Family("Ernie4_5ForCausalLM", _read_dense),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM", _read, drafts="mtp"),
}
