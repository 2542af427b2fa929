"""EXAONE 4: norms after attention and feed-forward only, a norm over each head of q and k, and
windows; where there are any, layers that see all tokens rotate nothing. K-EXAONE has norms before,
and experts chosen by sigmoids with a bias, beside a shared one."""

from __future__ import annotations

from typing import Any

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.experts.config import ExpertNames
from engine.model.families.olmo import NORMS
from engine.model.families.reading import (
    Family,
    by_forward,
    decoder,
    deepseek_routing,
    layers_alike,
    rope,
    shared_experts,
    silu_only,
    windows,
)
from engine.model.mixers.config import QkNorm

NAMES = ExpertNames(bias="mlp.e_score_correction_bias")


def _read_4(config: Any, _longest: int) -> ModelConfig:
    return decoder(config, layers_alike(config, norms=NORMS, **_attention(config)))


def _read_experts(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    how = deepseek_routing(config, config.num_experts)
    shared = shared_experts(config, config.num_shared_experts)
    experts = ExpertsConfig(config.moe_intermediate_size, how, shared=shared, names=NAMES)
    return decoder(config, layers_alike(config, by_forward(config, experts), **_attention(config)))


def _attention(config: Any) -> dict[str, Any]:
    turned, seen = rope(config), windows(config)
    ropes = tuple(turned if window or config.sliding_window is None else None for window in seen)
    return {"qk_norm": QkNorm.HEAD, "rope": ropes, "window": seen}


FAMILIES = {
    "exaone4": Family("Exaone4ForCausalLM", _read_4),
    "exaone_moe": Family("ExaoneMoeForCausalLM", _read_experts, drafts="/mtp"),
}
