"""One file for each line of models. It reads a Hugging Face config into features.

A new family is a new file with a `FAMILIES` of its own, and its line in `_FILES`
(docs/models.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from engine.model.config import ModelConfig, ModelError, UnsupportedModelError, read_json
from engine.model.families import (
    cohere,
    gemma,
    gemma4,
    glm4,
    llama,
    mistral,
    olmo,
    phi3,
    qwen2,
    qwen3,
)
from engine.model.families.hybrids import granite4, nemotron_h, qwen3_next
from engine.model.families.mixtures import (
    deepseek,
    dots1,
    ernie4_5,
    exaone,
    glm4_moe,
    gpt_oss,
    hunyuan,
    laguna,
    lfm2,
    mellum,
    minimax_m2,
    mixtral,
)
from engine.model.families.reading import Family, draft_layers, towers
from engine.model.families.sense import (
    MOST_POSITIONS,
    check_features,
    check_names,
    check_stated,
    text_of,
)
from engine.pooling.checkpoint import CLASSIFIES

_FILES = (
    *(llama, mistral, qwen2, qwen3, gemma, gemma4, glm4, phi3, cohere, olmo, exaone),
    *(mixtral, gpt_oss, glm4_moe, minimax_m2, hunyuan, ernie4_5, dots1, lfm2, mellum, deepseek),
    laguna,
    *(qwen3_next, granite4, nemotron_h),
)
FAMILIES: dict[str, Family] = {
    name: each for file in _FILES for name, each in file.FAMILIES.items()
}
"""Families by the model type of their configs."""
SPARSE: Final = (
    ": attention over tokens that an index chooses is not built: pages have no place for the"
    " index's keys yet, and transformers' own cached runs do not agree with its whole ones"
)
CHUNKED: Final = ": attention is cut at the borders of chunks, and experts scale their inputs"
LIMITED: Final = ": feed-forwards have limits by layer, which is not built"
BY_CHANNEL: Final = ": its delta rule lets each channel of a key fade by itself, which is not built"
REASONS: Final = {
    **dict.fromkeys(("kimi_linear", "kimi_k3"), BY_CHANNEL),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "hy_v4"), SPARSE),
    **dict.fromkeys(("llama4", "llama4_text"), CHUNKED),
    "step3p7": LIMITED,
}
"""Why models of a type are not supported, where that is known."""


def read_config(folder: Path, max_context_tokens: int = 0) -> ModelConfig:
    """Reads `config.json` and `generation_config.json` of a folder.

    Args:
        folder: of the model.
        max_context_tokens: the longest context that will be computed; 0: what the model allows.

    Raises:
        UnsupportedModelError: the engine does not support the model.
        ModelError: there is no readable config.
    """
    stated = read_json(folder / "config.json")
    check_names(stated)
    text = text_of(stated)
    known = FAMILIES.get(str(stated.get("model_type")))
    if known is None or not known.by_layer:
        _refuse_shapes({**stated, **text})
    model_type = _model_type(stated)
    check_stated({**stated, **text})
    try:
        config = _config_of(folder, stated, FAMILIES[model_type].reads_as)
    except Exception as error:  # Of any kind: transformers computes with what it has not checked.
        name = FAMILIES[model_type].architecture
        raise ModelError(f"{name}: {folder / 'config.json'} is not a valid config") from error
    ends = eos_tokens_of(config, folder)
    return build_config(model_type, config, ends, max_context_tokens)


def _config_of(folder: Path, stated: Mapping[str, Any], reads_as: str) -> Any:
    """The config as transformers reads it."""
    from transformers import AutoConfig

    if not reads_as:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    own = {key: value for key, value in stated.items() if key not in ("model_type", "auto_map")}
    return AutoConfig.for_model(reads_as, **own)


def build_config(
    model_type: str, config: Any, eos_token_ids: tuple[int, ...], max_context_tokens: int = 0
) -> ModelConfig:
    """Converts a transformers config of a family. Arguments are as in `read_config`.

    Raises:
        UnsupportedModelError: the engine does not support an option of it.
        ModelError: it has no meaning.
    """
    family = FAMILIES[model_type]
    try:
        text = config.text_config if family.has_images else config
        longest = min(int(text.max_position_embeddings), MOST_POSITIONS)
        features = family.read(text, min(max_context_tokens or longest, longest))
        unread = draft_layers(family.drafts, text)
        if family.has_images:
            tied = bool(config.tie_word_embeddings)
            features = replace(features, tie_embeddings=tied)
            unread = (*unread, *towers())
        features = replace(features, max_position_embeddings=longest, unread=unread)
        check_features(features)
    except ModelError as error:
        raise type(error)(f"{family.architecture}: {error}") from error
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ModelError(
            f"{family.architecture}: its config is not valid: {type(error).__name__}"
        ) from error
    return replace(features, architecture=family.architecture, eos_token_ids=eos_token_ids)


def _model_type(stated: Mapping[str, Any]) -> str:
    """The model type. It must agree with the architecture, because other models reuse names of
    architectures."""
    model_type = str(stated.get("model_type"))
    family = FAMILIES.get(model_type)
    supported = family.architecture if family else None
    names = stated.get("architectures") or [supported or f"of model type {model_type}"]
    if family is None or not set(names) & {*_named_like(family.architecture), family.also}:
        those = ", ".join(family.architecture for family in FAMILIES.values())
        raise UnsupportedModelError(
            f"architecture {', '.join(names)} (model type {model_type}) has no file in"
            f" engine/model/families{REASONS.get(model_type, '')}; those that have one are {those}"
        )
    return model_type


def _named_like(architecture: str) -> set[str]:
    """Classes of transformers with the same body: without a head, or with one that scores."""
    stem = architecture.removesuffix("ForCausalLM")
    if stem == architecture:
        return {architecture}
    return {architecture, f"{stem}Model", f"{stem}{CLASSIFIES}"}


def _refuse_shapes(stated: Mapping[str, Any]) -> None:
    """Refuses models whose layers keep KV of different shapes. All layers of a page have one."""
    for key in ("num_key_value_heads", "head_dim", "num_kv_heads"):
        value = stated.get(key)
        if isinstance(value, list) and len(found := set(map(str, value))) > 1:
            shapes = sorted(found, key=lambda each: (len(each), each))
            _refuse_shape(stated, f"{key} is [{', '.join(shapes)}]")
    usual = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
    for key, other in usual.items():
        if stated.get(key) not in (None, stated.get(other)):
            _refuse_shape(stated, f"{key} is {stated[key]}, {other} is {stated.get(other)}")
    if "block_configs" in stated:
        _refuse_shape(stated, "block_configs give each layer a shape of its own")
    if (shared := stated.get("num_kv_shared_layers")) not in (None, 0):
        _refuse_shape(stated, f"num_kv_shared_layers is {shared}: some layers keep none")


def _refuse_shape(stated: Mapping[str, Any], why: str) -> None:
    name = ", ".join(stated.get("architectures") or [str(stated.get("model_type"))])
    raise UnsupportedModelError(
        f"{name}: KV shapes that differ by layer are not supported in this family, and here {why}"
    )


def eos_tokens_of(config: Any, folder: Path) -> tuple[int, ...]:
    """Ids from a config of transformers and the generation config of a folder. Either may hold one
    id or a list.

    Raises:
        ModelError: they hold something else.
    """
    file = folder / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    ids: set[int] = set()
    stated = [getattr(each, "eos_token_id", None) for each in (config, config.get_text_config())]
    for value in (*stated, generation.get("eos_token_id")):
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int for each in found):
            raise ModelError(f"eos_token_id of {folder} is neither a number nor a list of numbers")
        ids.update(found)
    return tuple(sorted(ids))
