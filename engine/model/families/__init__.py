"""One file for each line of models. It reads a Hugging Face config into features.

A new family is a new file with a `FAMILIES` of its own, and its line in `_FILES`
(docs/adding-a-family.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.model.config import ModelConfig, ModelError, UnsupportedModelError, read_json
from engine.model.families import gemma, granite, llama, mistral, olmo, phi3, qwen2, qwen3
from engine.model.families.reading import Family

_FILES = (llama, mistral, qwen2, qwen3, gemma, phi3, granite, olmo)
FAMILIES: dict[str, Family] = {
    name: each for file in _FILES for name, each in file.FAMILIES.items()
}
"""Families by the model type of their configs."""


def read_config(folder: Path, max_context_tokens: int = 0) -> ModelConfig:
    """Reads `config.json` and `generation_config.json` of a folder.

    Args:
        folder: of the model.
        max_context_tokens: the longest context that will be computed; 0: what the model allows.

    Raises:
        UnsupportedModelError: the engine does not support the model.
        ModelError: there is no readable config.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    model_type = _model_type(read_json(folder / "config.json"))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"{folder / 'config.json'} is not a valid config") from error
    ends = _eos_token_ids(config, folder)
    return build_config(model_type, config, ends, max_context_tokens)


def build_config(
    model_type: str, config: Any, eos_token_ids: tuple[int, ...], max_context_tokens: int = 0
) -> ModelConfig:
    """Converts a transformers config of a family. Arguments are as in `read_config`.

    Raises:
        UnsupportedModelError: the engine does not support an option of it.
    """
    family = FAMILIES[model_type]
    longest = int(config.max_position_embeddings)
    try:
        features = family.read(config, min(max_context_tokens or longest, longest))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{family.architecture}: {error}") from error
    return replace(features, architecture=family.architecture, eos_token_ids=eos_token_ids)


def _model_type(stated: Mapping[str, Any]) -> str:
    """The model type. It must agree with the architecture, because other models reuse names of
    architectures."""
    model_type = str(stated.get("model_type"))
    family = FAMILIES.get(model_type)
    supported = family.architecture if family else None
    names = stated.get("architectures") or [supported or f"of model type {model_type}"]
    if supported is None or supported not in names:
        raise UnsupportedModelError(
            f"architecture {', '.join(names)} (model type {model_type}) is not supported;"
            f" supported are {', '.join(family.architecture for family in FAMILIES.values())}"
        )
    return model_type


def _eos_token_ids(config: Any, folder: Path) -> tuple[int, ...]:
    """Ids from the config and the generation config. Either may hold one id or a list."""
    file = folder / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    ids: set[int] = set()
    for value in (config.eos_token_id, generation.get("eos_token_id")):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
