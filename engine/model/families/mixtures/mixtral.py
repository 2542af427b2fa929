"""Mixtral: a Mistral whose feed-forwards are experts."""

from __future__ import annotations

from typing import Any

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.experts.config import ExpertNames
from engine.model.families.reading import (
    Family,
    decoder,
    layers_alike,
    routing,
    silu_only,
    windows,
)

NAMES = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")


def _read(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    how = routing(config.num_local_experts, config.num_experts_per_tok, normalised=True)
    experts = ExpertsConfig(config.intermediate_size, how, names=NAMES)
    return decoder(config, layers_alike(config, window=windows(config), feed_forward=experts))


FAMILIES = {"mixtral": Family("MixtralForCausalLM", _read)}
