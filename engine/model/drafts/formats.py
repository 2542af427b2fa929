"""What the checkpoint of an EAGLE-3 head says (Li et al. 2025, arXiv 2503.01840).

Two formats are published. The original one, which SpecForge writes as well, has a flat config of
`LlamaForCausalLMEagle3`, and its layer is `midlayer`. That of `speculators` has the layer's config
inside, names the model that it was made for, and has its layer at `layers.0`. Both keep the same
tensors.

A tap is numbered by the layer that reads it: tap j is what enters layer j, which is what layer
j - 1 has given. Original configs whose first number is 1 count what layers give instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from engine.model.config import (
    GatedConfig,
    ModelConfig,
    ModelError,
    read_json,
)
from engine.model.families import build_config
from engine.model.mixers.config import AttentionConfig, Kept

ORIGINAL: Final = "LlamaForCausalLMEagle3"
"""Architecture of the original format."""
KIND: Final = "eagle3"
"""`speculators_model_type` of the other one."""
BODY: Final = "draft"
"""Under this name the parts of a head are known here, whatever its format calls them."""
_TAPS: Final = "eagle_aux_hidden_state_layer_ids"
_NOT_BUILT: Final = ("norm_output", "norm_before_fc", "fc_norm", "parallel_drafting")
"""Options of later versions that change what a head computes."""


class HeadError(ModelError):
    """The head cannot draft for this model; the message says why."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """An EAGLE-3 head."""

    layer: ModelConfig
    """Its one layer, with the tokens that it may draft as the vocabulary."""
    taps: tuple[int, ...]
    """Layers whose inputs are read; the number of layers: what the last one gives."""
    vocab_size: int
    """Tokens of the model."""
    norm_before_residual: bool
    """What the layer adds to is the normed input."""
    names: Mapping[str, str]
    """What the checkpoint calls the modules, by their names here."""

    @property
    def kept(self) -> Kept:
        """What its layer keeps of each token."""
        return self.layer.kept


def read_head(folder: Path, model: ModelConfig) -> HeadConfig:
    """Reads the config of a head for this model.

    Raises:
        HeadError: it does not fit the model.
        ModelError: it cannot be read.
    """
    stated = read_json(folder / "config.json")
    names = stated.get("architectures") or ["not said"]
    if "speculators_model_type" in stated:
        return _read_speculators(stated, model)
    if ORIGINAL in names:
        return _read_original(stated, model)
    raise HeadError(
        f"{folder} is no draft head: its architecture is {', '.join(map(str, names))}; supported"
        f" are {ORIGINAL} and speculators_model_type {KIND}"
    )


def _read_original(stated: Mapping[str, Any], model: ModelConfig) -> HeadConfig:
    own = stated.get("eagle_config") or {}
    if own.get("use_aux_hidden_state") is False:
        raise HeadError(
            "eagle_config.use_aux_hidden_state is false: a head without taps is EAGLE-2"
        )
    taps = _taps(own.get(_TAPS) or stated.get(_TAPS), model, outputs_count=True)
    _refuse_options({**stated, **own})
    names = {
        "layers.0": "midlayer",
        **{name: name for name in ("fc", "norm", "embed_tokens", "lm_head")},
    }
    return _config(stated, stated, model, taps, bool(own.get("norm_before_residual")), names)


def _read_speculators(stated: Mapping[str, Any], model: ModelConfig) -> HeadConfig:
    kind = stated["speculators_model_type"]
    if kind != KIND:
        raise HeadError(f"speculators_model_type {kind} is not supported; {KIND} is")
    if "norm_before_residual" not in stated:
        raise HeadError("the head's config does not say norm_before_residual")
    inner = stated.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        raise HeadError("the head's config has no transformer_layer_config")
    verifier = (stated.get("speculators_config") or {}).get("verifier") or {}
    made_for = verifier.get("architectures") or []
    if made_for and model.architecture not in made_for:
        raise HeadError(
            f"the head was made for {verifier.get('name_or_path') or 'another model'}"
            f" ({', '.join(map(str, made_for))}), and this model is a {model.architecture}"
        )
    _refuse_options(stated)
    names = {name: name for name in ("layers.0", "fc", "norm", "embed_tokens", "lm_head")}
    taps = _taps(stated.get(_TAPS), model, outputs_count=False)
    whole = {**inner, "target_hidden_size": stated.get("target_hidden_size")}
    return _config(stated, whole, model, taps, bool(stated["norm_before_residual"]), names)


def _config(
    stated: Mapping[str, Any],
    inner: Mapping[str, Any],
    model: ModelConfig,
    taps: tuple[int, ...],
    norm_before_residual: bool,
    names: Mapping[str, str],
) -> HeadConfig:
    """The head of what both formats state; `inner` is about its layer."""
    read = inner.get("target_hidden_size") or inner.get("hidden_size")
    for what, found, wanted in (
        ("vocab_size", inner.get("vocab_size"), model.vocab_size),
        ("target hidden size", read, model.hidden_size),
        ("hidden_size", inner.get("hidden_size"), model.hidden_size),
        ("num_hidden_layers", inner.get("num_hidden_layers"), 1),
    ):
        if found != wanted:
            raise HeadError(f"the head's {what} is {found}, and {wanted} is needed for this model")
    drafted = stated.get("draft_vocab_size") or model.vocab_size
    if type(drafted) is not int or not 1 <= drafted <= model.vocab_size:
        raise HeadError(f"the head's draft_vocab_size is {drafted}, of {model.vocab_size} tokens")
    return HeadConfig(
        _layer(inner, drafted), taps, model.vocab_size, norm_before_residual, dict(names)
    )


def _layer(stated: Mapping[str, Any], drafted: int) -> ModelConfig:
    from transformers import AutoConfig

    kind = str(stated.get("model_type", "llama"))
    if kind != "llama":
        raise HeadError(f"the head's layer is a {kind}; supported is llama")
    own = {key: value for key, value in stated.items() if key not in ("model_type", "auto_map")}
    try:
        config = AutoConfig.for_model(kind, **own)
    except Exception as error:  # Of any kind: transformers computes with what it has not checked.
        raise HeadError("the config of the head's layer is not valid") from error
    layer = build_config(kind, config, ())
    mixer, forward = layer.layers[0].mixer, layer.layers[0].feed_forward
    assert isinstance(mixer, AttentionConfig)
    assert isinstance(forward, GatedConfig)
    wide = replace(mixer, inputs=2 * layer.hidden_size)
    return replace(
        layer,
        layers=(replace(layer.layers[0], mixer=wide),),
        vocab_size=drafted,
        tie_embeddings=False,
        body=BODY,
        head=f"{BODY}.lm_head",
    )


def _taps(stated: Any, model: ModelConfig, *, outputs_count: bool) -> tuple[int, ...]:
    layers = model.num_layers
    if stated is None:
        stated = [2, layers // 2, layers - 3]  # What is trained where nothing is said.
    if not isinstance(stated, list) or not stated or not all(type(tap) is int for tap in stated):
        raise HeadError(f"the head's {_TAPS} is {stated!r}, and no list of layers")
    shift = int(outputs_count and stated[0] == 1)
    taps = tuple(tap + shift for tap in stated)
    if bad := [tap for tap in taps if not 0 <= tap <= layers]:
        raise HeadError(
            f"the head reads what enters layer {bad[0]}, and this model has {layers} layers"
        )
    return taps


def _refuse_options(stated: Mapping[str, Any]) -> None:
    if found := [name for name in _NOT_BUILT if stated.get(name)]:
        raise HeadError(f"the head's {found[0]} is set, which is not built")


def tensor_names(head: HeadConfig, there: Collection[str]) -> dict[str, str]:
    """What the checkpoint calls its tensors, by their names here. Those of others stay theirs."""
    found = {}
    for name in there:
        bare = name.removeprefix("model.")
        ours = (
            f"{BODY}.{own}{bare[len(theirs) :]}"
            for own, theirs in head.names.items()
            if bare.startswith(f"{theirs}.")
        )
        found[next(ours, bare)] = name
    return found
