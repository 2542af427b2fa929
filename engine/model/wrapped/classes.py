"""Which class of transformers a folder needs, and whether it can run over pages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine.model.config import ModelError, UnsupportedModelError, read_json
from engine.model.families.sense import check_names, check_stated

RECURRENT: Final = "it folds tokens into a recurrent state, which its code keeps for itself"
ENCODER: Final = "it encodes: tokens see those behind them"
IMAGES: Final = "it reads images or sounds; of such models only those with a file are read"
BIASES: Final = "it adds biases by position to the products of q and k (ALiBi)"
BY_LENGTH: Final = "its rope follows the length of the longest sequence in a batch"
QUANTISED: Final = "its checkpoint is in few bits; float ones are read, which FP8 rounds on load"
_STATES: Final = ("linear", "mamba", "conv", "recurrent", "delta", "hybrid")
"""What types of layers with a state are called."""
_BY_LENGTH: Final = ("dynamic", "longrope")
_CODE: Final = re.compile(
    "auto_map|quantization_config|attribute_map|sub_configs"
    "|_?(attn|experts)_implementation(_internal)?"
)
"""Keys that are left out: transformers would fetch kernels, and run them, that a folder names as an
implementation."""
_TOWERS: Final = ("vision_config", "audio_config")


class Found(NamedTuple):
    """A class and its config."""

    kind: Any
    """Class of transformers."""
    config: Any
    """Config of transformers, of the text alone."""


def refusal(name: str, why: str) -> UnsupportedModelError:
    """The error that names a class and the reason."""
    return UnsupportedModelError(f"{name}, through transformers' own code: {why}")


def find(folder: Path) -> Found:
    """Finds the class of a folder, without any code from that folder.

    Raises:
        UnsupportedModelError: transformers has none, or it cannot run here.
        ModelError: there is no readable config.
    """
    stated = read_json(folder / "config.json")
    check_names(stated)
    check_stated(stated)
    model_type = str(stated.get("model_type"))
    name = _class_name(stated, model_type)
    kind, config = _built(name, model_type, stated, folder)
    for why in _obstacles(kind, config, stated):
        raise refusal(name, why)
    return Found(kind, config)


def _class_name(stated: Mapping[str, Any], model_type: str) -> str:
    """The name of the class with a head that draws tokens."""
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = [str(each) for each in stated.get("architectures") or ()]
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if known is None:
        wanted = ", ".join(named) or f"model type {model_type}"
        own = " (code in a model's folder, auto_map, is never run)" if "auto_map" in stated else ""
        towers = any(key in stated for key in _TOWERS)
        why = IMAGES if towers else f"transformers {__version__} has no decoder of this type{own}"
        raise refusal(wanted, why)
    if named and known not in named:
        raise refusal(", ".join(named), f"of model type {model_type} the decoder is {known}")
    return str(known)


def _built(name: str, model_type: str, stated: Mapping[str, Any], folder: Path) -> tuple[Any, Any]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[model_type].from_dict(_harmless(stated))
        # As without such keys: transformers chooses among its own, and ours takes its place.
        config._attn_implementation = config._experts_implementation = None
        return getattr(transformers, name), config
    except Exception as error:  # Of any kind: transformers computes with what it has not checked.
        raise ModelError(f"{name}: {folder / 'config.json'} is not a valid config") from error


def _harmless(stated: Any) -> Any:
    """What a folder states, of parts as well, without what names code or renames attributes."""
    if isinstance(stated, Mapping):
        own = {key: value for key, value in stated.items() if not _CODE.fullmatch(key)}
        return {key: _harmless(value) for key, value in own.items()}
    return [_harmless(each) for each in stated] if isinstance(stated, list) else stated


def _obstacles(kind: Any, config: Any, stated: Mapping[str, Any]) -> Iterator[str]:
    """Why such a model cannot run, by its config."""
    if stated.get("quantization_config"):
        yield QUANTISED
    if any(getattr(config, key, None) is not None for key in _TOWERS):
        yield IMAGES
    if getattr(config, "is_encoder_decoder", False):
        yield ENCODER
    types = getattr(config, "layer_types", None) or ()
    if kind._is_stateful is True or any(state in str(each) for each in types for state in _STATES):
        yield RECURRENT
    if getattr(config, "alibi", False) or "alibi" in str(stated.get("position_embedding_type")):
        yield BIASES
    ropes = getattr(config, "rope_parameters", None) or {}
    if any(each in _BY_LENGTH for each in _rope_types(ropes)):
        yield BY_LENGTH


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Types of the ropes of all kinds of layers."""
    for key, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _rope_types(value)
        elif key == "rope_type":
            yield str(value)
