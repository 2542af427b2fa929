"""Hunyuan 1, dense and with experts: norms of q and k behind rope, and experts beside a shared one,
which are chosen by softmax. Hunyuan 3: the attention of Qwen3, and experts that are chosen by
sigmoids with a bias. Its draft layers are not read."""

from __future__ import annotations

from typing import Any

import torch

from engine.model.config import ExpertsConfig, GatedConfig, ModelConfig, UnsupportedModelError
from engine.model.experts.config import ExpertNames
from engine.model.families.reading import (
    Family,
    biases,
    by_forward,
    decoder,
    gated,
    head_dim,
    layers_alike,
    rope,
    routing,
    sigmoid_routing,
    silu_only,
)
from engine.model.mixers.config import QkNorm
from engine.model.mixers.rope import Rope

V1_NAMES = ExpertNames(router="mlp.gate.wg")
NAMES = ExpertNames(router="mlp.router.gate", bias="mlp.expert_bias")
SHARED = "mlp.shared_mlp"


def _read(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    factor = float(config.router_scaling_factor)
    how = sigmoid_routing(config.num_experts, config.num_experts_per_tok, factor=factor)
    width = config.moe_intermediate_size
    shared = _shared(config, width * config.num_shared_experts)
    experts = ExpertsConfig(width, how, shared=shared, names=NAMES)
    forwards = by_forward(config, experts)
    return decoder(config, layers_alike(config, forwards, qk_norm=QkNorm.HEAD, **biases(config)))


def _shared(config: Any, width: int) -> GatedConfig:
    return gated(
        config,
        width=width,
        gate_up=(f"{SHARED}.gate_proj", f"{SHARED}.up_proj"),
        down=f"{SHARED}.down_proj",
    )


def _read_dense(config: Any, _longest: int) -> ModelConfig:
    return _decoder_v1(config, gated(config))


def _read_experts(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    experts, chosen, layers = config.num_experts, config.moe_topk, int(config.num_hidden_layers)
    if isinstance(experts, list) and len(set(experts)) == 1:
        experts = experts[0]
    if isinstance(chosen, list) and len(chosen) == layers and len(set(chosen)) == 1:
        chosen = chosen[0]
    if isinstance(experts, list) or isinstance(chosen, list):
        raise UnsupportedModelError("experts, or the number that is chosen, differ by layer")
    how = routing(experts, chosen, normalised=True)
    width = int(config.intermediate_size)
    shared = _shared(config, width)
    return _decoder_v1(config, ExpertsConfig(width, how, shared=shared, names=V1_NAMES))


def _decoder_v1(config: Any, forward: GatedConfig | ExpertsConfig) -> ModelConfig:
    layers = layers_alike(
        config,
        forward,
        rope=_rope_v1(config),
        qk_norm=QkNorm.HEAD,
        q_norm="query_layernorm",
        k_norm="key_layernorm",
        norm_behind=True,
        **biases(config),
    )
    return decoder(config, layers)


def _rope_v1(config: Any) -> Rope:
    """What checkpoints call dynamic, with an alpha, has a larger base, and does not follow the
    length of a sequence."""
    parameters = config.rope_parameters or {}
    alpha = parameters.get("alpha")
    if parameters.get("rope_type") != "dynamic" or not alpha:
        return rope(config)
    width = head_dim(config)
    base = parameters["rope_theta"] * float(alpha) ** (width / (width - 2))
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    return Rope(tuple((1.0 / base**exponents).tolist()))


FAMILIES = {
    "hunyuan_v1_dense": Family("HunYuanDenseV1ForCausalLM", _read_dense),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM", _read_experts),
    "hy_v3": Family("HYV3ForCausalLM", _read, drafts="layers"),
}
