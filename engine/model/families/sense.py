"""What a config cannot mean is refused here, before weights are read.

1. `check_stated` reads the file as it was written, before transformers does: numbers from which
   lists are made are bounded, so that no config takes the machine's memory.
2. `check_features` reads what a family made of it. A feature that would give no numbers, such as a
   window of no tokens or a cap of 0, is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from engine.model.config import (
    BesideConfig,
    ExpertsConfig,
    FeedForwardConfig,
    LayerConfig,
    ModelConfig,
    ModelError,
    UnsupportedModelError,
)
from engine.model.mixers.config import AttentionConfig, DeltaConfig, LatentConfig, MambaConfig
from engine.model.mixers.rope import Rope

MOST_LAYERS: Final = 1024
MOST_EXPERTS: Final = 1 << 16
"""Experts of all layers. The largest models that we know have some 25,000."""
MOST_HEAD_DIM: Final = 1024
MOST_STATE_DIM: Final = 1024
"""Rows or columns of the matrix that is a head's state."""
KERNELS: Final = range(2, 9)
"""Tokens that a short convolution reads."""
MOST_SIZE: Final = 1 << 24
"""Largest dimension of a weight."""
MOST_POSITIONS: Final = 1 << 24
"""Rope counts them in float32, which is exact up to here. No sequence is longer, whatever a config
allows."""
LAYERS: Final = "num_hidden_layers"
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_names(stated: Mapping[str, Any]) -> None:
    """Checks the names of architectures in the content of config.json.

    Raises:
        ModelError: they are no list of names.
    """
    names = stated.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError("architectures of config.json is no list of names")


def text_of(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of the text part of a checkpoint that reads images, too; else nothing.

    Raises:
        ModelError: it is no object.
    """
    text = stated.get("text_config") or {}
    if not isinstance(text, dict):
        raise ModelError(f"{_named(stated)}: text_config of config.json is no object")
    return {key: text[key] for key in text.keys() - {"architectures", "model_type"}}


def check_stated(stated: Mapping[str, Any]) -> None:
    """Checks the content of config.json.

    Raises:
        ModelError: it states more layers or experts than any model has.
        UnsupportedModelError: tokens see those behind them.
    """
    for key, value in (("use_bidirectional_attention", True), ("is_causal", False)):
        if stated.get(key) is value:
            raise UnsupportedModelError(f"{_named(stated)}: {key}: attention is causal only")
    layers = _number(stated, LAYERS, 1, MOST_LAYERS)
    for key in EXPERTS:
        experts = _number(stated, key, 0, MOST_EXPERTS)
        if layers * experts > MOST_EXPERTS:
            raise ModelError(
                f"{_named(stated)}: {key} is {experts} in {layers} layers, which is more than"
                f" {MOST_EXPERTS} experts in all"
            )


def _number(stated: Mapping[str, Any], key: str, least: int, most: int) -> int:
    """A whole number within these bounds; the least if it is not stated."""
    value = stated.get(key)
    if value is None:
        return least
    if type(value) is not int or not least <= value <= most:
        raise ModelError(f"{_named(stated)}: {key} is {value!r}; it can be {least} to {most}")
    return value


def _named(stated: Mapping[str, Any]) -> str:
    return ", ".join(stated.get("architectures") or [str(stated.get("model_type"))])


def check_features(config: ModelConfig) -> None:
    """Checks the features of a model.

    Raises:
        ModelError: it says which one cannot be.
    """
    for fault in _faults(config):
        raise ModelError(f"its config cannot be: {fault}")


def _faults(config: ModelConfig) -> Iterator[str]:
    sizes = {
        "the vocabulary": config.vocab_size,
        "the hidden size": config.hidden_size,
    }
    for name, size in sizes.items():
        yield from _outside(name, size, MOST_SIZE)
    yield from _outside("the number of positions", config.max_position_embeddings, MOST_POSITIONS)
    if not 0 <= config.norm_eps < math.inf:
        yield f"the epsilon of norms is {config.norm_eps}"
    for factor in (config.embedding_scale, config.residual_scale, config.logits_scale):
        if not math.isfinite(factor):
            yield f"a multiplier is {factor}"
    yield from _cap_faults(config.logits_soft_cap)
    for layer in dict.fromkeys(config.layers):
        yield from _layer_faults(layer)
    yield from _kept_faults(config)
    if config.layer_inputs is not None:
        yield from _outside("the width of layers' inputs", config.layer_inputs.width, MOST_SIZE)
        yield from _outside("their vocabulary", config.layer_inputs.vocab_size, MOST_SIZE)


def _kept_faults(config: ModelConfig) -> Iterator[str]:
    """Layers that see equally many tokens share pages. Where all do, those that keep none follow
    the others."""
    shapes: dict[int | None, set[tuple[int, int]]] = {}
    states = set()
    for kept in config.keepers.values():
        if kept.state:
            states.add(kept)
        else:
            shapes.setdefault(kept.window, set()).add((kept.kv_heads, kept.head_dim))
    if any(len(found) > 1 for found in shapes.values()):
        yield "K and V of layers that see equally many tokens differ in shape"
    if len(states) > 1:
        yield "the states of layers differ in shape"
    if not config.shapes_differ and list(config.keepers) != list(range(len(config.keepers))):
        yield "layers with K and V of their own are behind layers without"
    for index, layer in enumerate(config.layers):
        own = layer.mixer.kv_from if isinstance(layer.mixer, AttentionConfig) else None
        if own is not None and (own >= index or own not in config.keepers):
            yield f"layer {index} reads K and V of layer {own}"


def _layer_faults(layer: LayerConfig) -> Iterator[str]:
    if isinstance(layer.mixer, AttentionConfig):
        yield from _attention_faults(layer.mixer)
    elif isinstance(layer.mixer, DeltaConfig):
        yield from _delta_faults(layer.mixer)
    elif isinstance(layer.mixer, LatentConfig):
        yield from _latent_faults(layer.mixer)
    elif isinstance(layer.mixer, MambaConfig):
        yield from _mamba_faults(layer.mixer)
    elif layer.mixer is not None:
        yield from _outside("the number of channels", layer.mixer.channels, MOST_SIZE)
    if layer.feed_forward is not None:
        yield from _feed_forward_faults(layer.feed_forward)


def _attention_faults(own: AttentionConfig) -> Iterator[str]:
    yield from _outside("the number of heads", own.heads, MOST_SIZE)
    yield from _outside("the number of KV heads", own.kv_heads, MOST_SIZE)
    if own.kv_heads and own.heads % own.kv_heads:
        yield f"{own.heads} heads do not share {own.kv_heads} KV heads"
    if not math.isfinite(own.scale):
        yield f"the scale of attention is {own.scale}"
    if own.window is not None and own.window < 1:
        yield f"a window of {own.window} tokens shows nothing"
    yield from _cap_faults(own.soft_cap)
    yield from _rope_faults(own.rope)


def _latent_faults(own: LatentConfig) -> Iterator[str]:
    sizes = {
        "the number of heads": own.heads,
        "the latent of K and V": own.rank,
        "the latent of queries": own.q_rank if own.q_rank is not None else 1,
    }
    for name, size in sizes.items():
        yield from _outside(name, size, MOST_SIZE)
    yield from _outside("K of a head that a latent makes", own.k_dim, MOST_HEAD_DIM)
    yield from _outside("V of a head", own.v_dim, MOST_HEAD_DIM)
    if not math.isfinite(own.scale):
        yield f"the scale of attention is {own.scale}"
    yield from _rope_faults(own.rope)


def _rope_faults(rope: Rope | None) -> Iterator[str]:
    numbers = (*rope.frequencies, rope.scale) if rope else ()
    if not all(map(math.isfinite, numbers)):
        yield "a frequency of rope is no number"


def _delta_faults(own: DeltaConfig) -> Iterator[str]:
    yield from _outside("the number of linear key heads", own.key_heads, MOST_SIZE)
    yield from _outside("the number of linear value heads", own.value_heads, MOST_SIZE)
    if own.key_heads and own.value_heads % own.key_heads:
        yield f"{own.value_heads} linear value heads do not share {own.key_heads} key heads"
    yield from _outside("the width of a linear key head", own.key_dim, MOST_STATE_DIM)
    yield from _outside("the width of a linear value head", own.value_dim, MOST_STATE_DIM)
    if own.kernel not in KERNELS:
        yield f"linear_conv_kernel_dim is {own.kernel}; it can be 2 to {KERNELS[-1]}"


def _mamba_faults(own: MambaConfig) -> Iterator[str]:
    yield from _outside("the number of Mamba heads", own.heads, MOST_SIZE)
    yield from _outside("the width of a Mamba head", own.head_dim, MOST_STATE_DIM)
    yield from _outside("the width of a Mamba state", own.state_dim, MOST_STATE_DIM)
    if own.kernel not in KERNELS:
        yield f"Mamba's convolution reads {own.kernel} tokens; it can be 2 to {KERNELS[-1]}"
    if not 0 <= own.least_step < own.most_step:
        yield f"time steps are between {own.least_step} and {own.most_step}"


def _feed_forward_faults(own: FeedForwardConfig) -> Iterator[str]:
    if isinstance(own, BesideConfig):
        yield from _feed_forward_faults(own.gated)
        yield from _feed_forward_faults(own.experts)
        return
    yield from _outside("the width of a feed-forward", own.width, MOST_SIZE)
    if not isinstance(own, ExpertsConfig):
        return
    if own.shared is not None:
        yield from _outside("the width of the shared expert", own.shared.width, MOST_SIZE)
    if own.reduced is not None and not 1 <= own.reduced.size <= MOST_SIZE:
        yield f"experts read {own.reduced.size} numbers"
    for number in (own.gate.sharpness, own.gate.shift, own.gate.limit or 0.0):
        if not math.isfinite(number):
            yield f"the gate of experts has {number}"
    if own.gate.limit is not None and own.gate.limit <= 0:
        yield f"the limit of experts is {own.gate.limit}"


def _cap_faults(cap: float | None) -> Iterator[str]:
    if cap is not None and not 0 < cap < math.inf:
        yield f"a soft cap is {cap}"


def _outside(name: str, size: int, most: int) -> Iterator[str]:
    if not 1 <= size <= most:
        yield f"{name} is {size}; it can be 1 to {most}"
