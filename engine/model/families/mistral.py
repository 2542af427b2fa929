"""Mistral: a Llama whose layers may have windows. In Ministral 3 queries grow beyond the positions
that it was trained with first. Of checkpoints of Mistral 3 that read images the text part is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.config import ModelConfig
from engine.model.families.reading import Family, by_text, decoder, layers_alike, rope, windows
from engine.model.mixers.rope import Growth


def _read(config: Any, _longest: int) -> ModelConfig:
    return decoder(config, layers_alike(config, window=windows(config)))


def _read_ministral_3(config: Any, _longest: int) -> ModelConfig:
    stated, turned = config.rope_parameters, rope(config)
    if beta := stated.get("llama_4_scaling_beta"):
        growth = Growth(float(beta), int(stated["original_max_position_embeddings"]))
        turned = replace(turned, growth=growth)
    return decoder(config, layers_alike(config, window=windows(config), rope=turned))


_PARTS = {"mistral": _read, "ministral3": _read_ministral_3}

FAMILIES = {
    "mistral": Family("MistralForCausalLM", _read),
    "ministral3": Family("Ministral3ForCausalLM", _read_ministral_3),
    "mistral3": Family("Mistral3ForConditionalGeneration", by_text(_PARTS), has_images=True),
}
