"""MiniMax-M2 and its successors of the same class: a norm over all of q and of k, rope of a part
of each head, and experts that are chosen by sigmoids with a bias."""

from __future__ import annotations

from typing import Any

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.experts.config import ExpertNames
from engine.model.families.reading import (
    Family,
    decoder,
    layers_alike,
    rope,
    sigmoid_routing,
    silu_only,
)
from engine.model.mixers.config import QkNorm

BLOCK = "block_sparse_moe"
NAMES = ExpertNames(
    f"{BLOCK}.gate",
    f"{BLOCK}.experts",
    "w1",
    "w3",
    "w2",
    bias=f"{BLOCK}.e_score_correction_bias",
)


def _read(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    how = sigmoid_routing(config.num_local_experts, config.num_experts_per_tok)
    experts = ExpertsConfig(config.intermediate_size, how, names=NAMES)
    turned = rope(config, partial=True)
    return decoder(config, layers_alike(config, experts, rope=turned, qk_norm=QkNorm.WHOLE))


FAMILIES = {"minimax_m2": Family("MiniMaxM2ForCausalLM", _read)}
