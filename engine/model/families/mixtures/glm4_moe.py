"""GLM-4.5 to 4.7, and Solar Open: perhaps rope of a part of each head and norms over the heads of q
and k, and behind a few plain layers experts with a bias of the choice. Of GLM-4.5V the text part is
read."""

from __future__ import annotations

from typing import Any

from engine.model.config import ModelConfig
from engine.model.families.reading import Family, decoder, deepseek_experts, layers_alike, rope
from engine.model.mixers.config import QkNorm


def read(config: Any, _longest: int) -> ModelConfig:
    """See `Family`."""
    layers = layers_alike(
        config,
        deepseek_experts(config, getattr(config, "first_k_dense_replace", 0)),
        rope=rope(config, partial=True),
        qk_norm=QkNorm.HEAD if getattr(config, "use_qk_norm", False) else None,
        qkv_bias=bool(config.attention_bias),
    )
    return decoder(config, layers)


FAMILIES = {
    "glm4_moe": Family("Glm4MoeForCausalLM", read, drafts="layers"),
    "solar_open": Family("SolarOpenForCausalLM", read),
    "glm4v_moe": Family("Glm4vMoeForConditionalGeneration", read, has_images=True, drafts="layers"),
}
