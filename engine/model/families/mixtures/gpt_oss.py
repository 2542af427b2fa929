"""gpt-oss: attention with sinks, windows in every second layer, and experts that clamp. Its
checkpoints have them in MXFP4, or as float tensors that hold all experts of a layer."""

from __future__ import annotations

from typing import Any

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.experts.config import ExpertNames, Gate, Scores
from engine.model.families.reading import Family, biases, decoder, layers_alike, routing, windows

NAMES = ExpertNames(router="mlp.router", stacked=True)


def _read(config: Any, _longest: int) -> ModelConfig:
    how = routing(config.num_local_experts, config.num_experts_per_tok, Scores.SOFTMAX_OF_CHOSEN)
    experts = ExpertsConfig(
        config.intermediate_size,
        how,
        Gate(config.swiglu_alpha, 1.0, config.swiglu_limit),
        router_bias=True,
        bias=True,
        names=NAMES,
    )
    attention: dict[str, Any] = {"window": windows(config), "sinks": True, **biases(config)}
    return decoder(config, layers_alike(config, experts, **attention))


FAMILIES = {"gpt_oss": Family("GptOssForCausalLM", _read)}
