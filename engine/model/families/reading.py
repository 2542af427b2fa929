"""What the files of the families share: how parts of a Hugging Face config are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from engine.model.config import (
    Activation,
    ExpertsConfig,
    FeedForwardConfig,
    GatedConfig,
    LayerConfig,
    ModelConfig,
    ModelError,
    Norms,
    Unread,
    UnsupportedModelError,
)
from engine.model.experts.config import Routing, Scores
from engine.model.families.sense import MOST_HEAD_DIM
from engine.model.mixers.config import AttentionConfig
from engine.model.mixers.rope import Rope

ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn", "proportional")
"""Rope types whose frequencies do not depend on the length of the sequence."""
FULL, SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS: Final = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}


MOST_DRAFT_LAYERS: Final = 64
"""No model has more; each has a name to be ignored by."""
_TOWERS: Final = (
    *("visual", "vision_tower", "vision_model", "multi_modal_projector", "embed_vision"),
    *("vision_embedder", "audio_tower", "embed_audio", "mm_projector"),
)


@dataclass(frozen=True, slots=True)
class Family:
    """Models whose configs are read alike."""

    architecture: str
    """The name of transformers' class."""
    read: Callable[[Any, int], ModelConfig]
    """Reads a transformers config. The second argument is the longest context that will be
    computed, in tokens."""
    also: str = ""
    """Another name of the class, which published checkpoints or transformers have."""
    by_layer: bool = False
    """Layers may keep K and V of several shapes, or none."""
    has_images: bool = False
    """Checkpoints read images, too. Their text part is read alone; it is what `read` gets."""
    reads_as: str = ""
    """Model type under which transformers knows such configs, if that is another."""
    drafts: str = ""
    """Where checkpoints may have draft layers: `layers` behind the last, or another module.
    That of a name like `/mtp` is beside the body."""


def decoder(config: Any, layers: Sequence[LayerConfig], **features: Any) -> ModelConfig:
    """The features that all families read alike, and `features`."""
    common: dict[str, Any] = {
        "architecture": "",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "norm_eps": getattr(config, "rms_norm_eps", None) or getattr(config, "norm_eps", None),
        "max_position_embeddings": config.max_position_embeddings,
        "layers": tuple(layers),
        "tie_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
    }
    return ModelConfig(**{**common, **features})


def layers_alike(
    config: Any, feed_forward: Any = None, norms: Norms | None = None, **attention: Any
) -> list[LayerConfig]:
    """Layers with attention and a feed-forward, by default one rope and a gated one. Features that
    are tuples have a value for each layer, but `qkv`."""
    heads = int(config.num_attention_heads)
    given: dict[str, Any] = {
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": head_dim(config),
        "scale": head_dim(config) ** -0.5,
        **attention,
    }
    if "rope" not in given:
        given["rope"] = rope(config)
    qkv = {"qkv": given.pop("qkv")} if "qkv" in given else {}
    forward = feed_forward or gated(config)
    return [
        LayerConfig(
            AttentionConfig(
                **{name: _of_layer(index, each) for name, each in given.items()}, **qkv
            ),
            _of_layer(index, forward),
            norms or Norms(),
        )
        for index in range(int(config.num_hidden_layers))
    ]


def _of_layer(index: int, feature: Any) -> Any:
    return feature[index] if isinstance(feature, tuple) else feature


def biases(config: Any) -> dict[str, Any]:
    """Biases of attention, where a family has them on all products or on none."""
    bias = bool(config.attention_bias)
    return {"qkv_bias": bias, "output_bias": bias}


def head_dim(config: Any) -> int:
    """Numbers of a head.

    Raises:
        ModelError: no head has so many. Tables are made of this number.
    """
    stated = getattr(config, "head_dim", None)
    found = int(stated or config.hidden_size // config.num_attention_heads)
    if not 1 <= found <= MOST_HEAD_DIM:
        raise ModelError(f"the width of a head is {found}; it can be 1 to {MOST_HEAD_DIM}")
    return found


def gated(config: Any, **features: Any) -> GatedConfig:
    """The feed-forward that most families have."""
    if getattr(config, "pretraining_tp", 1) not in (None, 1):
        raise UnsupportedModelError("pretraining_tp other than 1 is not supported")
    stated = getattr(config, "hidden_activation", None) or config.hidden_act
    common: dict[str, Any] = {
        "width": getattr(config, "intermediate_size", None),
        "activation": activation(stated),
        "bias": bool(getattr(config, "mlp_bias", False)),
    }
    return GatedConfig(**{**common, **features})


def silu_only(config: Any) -> None:
    """Refuses experts with another activation.

    Raises:
        UnsupportedModelError: it is another.
    """
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"experts with the activation {config.hidden_act} are not supported; silu is"
        )


def routing(experts: int, chosen: int, scores: Scores = Scores.SOFTMAX, **features: Any) -> Routing:
    """How experts are chosen.

    Raises:
        ModelError: there are fewer.
    """
    try:
        return Routing(experts, chosen, scores, **features)
    except ValueError as error:
        raise ModelError(str(error)) from error


def sigmoid_routing(experts: int, chosen: int, **features: Any) -> Routing:
    """How DeepSeek-V3 and those after it choose experts."""
    features = {"normalised": True, "bias": True, **features}
    return routing(experts, chosen, Scores.SIGMOID, **features)


def deepseek_routing(config: Any, experts: int) -> Routing:
    """The choice among so many experts as DeepSeek-V3's config states it."""
    return sigmoid_routing(
        experts,
        config.num_experts_per_tok,
        normalised=bool(config.norm_topk_prob),
        factor=float(config.routed_scaling_factor),
        groups=config.n_group,
        open_groups=config.topk_group,
        best_of_group=2,
    )


def shared_experts(config: Any, count: int | None) -> GatedConfig | None:
    """The experts of all tokens, which are one that is so many times as wide."""
    if not count:
        return None
    return gated(
        config,
        width=config.moe_intermediate_size * count,
        gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        down="mlp.shared_experts.down_proj",
    )


def deepseek_experts(config: Any, first: int | None = None) -> tuple[FeedForwardConfig, ...]:
    """Experts as DeepSeek-V3 has them in all layers from `first` on, which a config states."""
    silu_only(config)
    how = deepseek_routing(config, config.n_routed_experts)
    shared = shared_experts(config, config.n_shared_experts)
    experts = ExpertsConfig(config.moe_intermediate_size, how, shared=shared)
    plain = config.first_k_dense_replace if first is None else first
    layers = range(int(config.num_hidden_layers))
    return tuple(experts if index >= plain else gated(config) for index in layers)


def by_forward(config: Any, experts: ExpertsConfig) -> tuple[FeedForwardConfig, ...]:
    """Experts in the layers that are said to have them, and one feed-forward in the others.

    Raises:
        UnsupportedModelError: there are others.
    """
    known: dict[str, FeedForwardConfig] = {"sparse": experts}
    stated = list(config.mlp_layer_types)
    if "dense" in stated:
        known["dense"] = gated(config)
    if unknown := set(stated) - known.keys():
        raise UnsupportedModelError(f"feed-forwards of type {', '.join(sorted(unknown))}")
    return tuple(known[kind] for kind in stated)


def by_text(readers: Mapping[str, Callable[[Any, int], ModelConfig]]) -> Any:
    """Reads the text part of a checkpoint that may be of several families.

    Args:
        readers: by the model type of the text part.
    """

    def read(config: Any, longest: int) -> ModelConfig:
        if config.model_type not in readers:
            raise UnsupportedModelError(
                f"its text part is a {config.model_type}; supported are {', '.join(readers)}"
            )
        return readers[config.model_type](config, longest)

    return read


def towers() -> tuple[Unread, ...]:
    """What a checkpoint has for images."""
    prefixes = [f"{body}{tower}." for tower in _TOWERS for body in ("", "model.")]
    return tuple(Unread(prefix, "images") for prefix in prefixes)


def draft_layers(where: str, config: Any) -> tuple[Unread, ...]:
    """What of a checkpoint guesses tokens ahead. `where`: see `Family.drafts`."""
    if where == "layers":
        first = int(config.num_hidden_layers)
        count = int(getattr(config, "num_nextn_predict_layers", None) or 1)
        if not 0 < count <= MOST_DRAFT_LAYERS:
            most = f"it can be 0 to {MOST_DRAFT_LAYERS}"
            raise ModelError(f"num_nextn_predict_layers is {count}; {most}")
        names = [f"layers.{index}" for index in range(first, first + count)]
    elif where.startswith("/"):
        return (Unread(f"{where[1:]}.", "draft layers"),)
    else:
        names = [where] if where else []
    return tuple(Unread(f"model.{name}.", "draft layers") for name in names)


def qwen_routing(config: Any) -> Routing:
    """How Qwen chooses experts."""
    experts, chosen = config.num_experts, config.num_experts_per_tok
    return routing(experts, chosen, normalised=bool(getattr(config, "norm_topk_prob", True)))


def qwen_experts(config: Any, experts: ExpertsConfig) -> tuple[FeedForwardConfig, ...]:
    """Experts in every so many layers of Qwen, but for those that are named; else one
    feed-forward."""
    step, plain = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    return tuple(
        experts if index not in plain and (index + 1) % step == 0 else gated(config)
        for index in range(int(config.num_hidden_layers))
    )


def activation(name: str) -> Activation:
    """An activation by transformers' name.

    Raises:
        UnsupportedModelError: there is none of this name.
    """
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {name} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def kinds(config: Any) -> list[str]:
    """The kind of each layer: all tokens or a window.

    Raises:
        UnsupportedModelError: there are others.
    """
    stated: list[str] | None = getattr(config, "layer_types", None)
    found = stated or [SLIDING] * int(config.num_hidden_layers)
    if unknown := set(found) - {FULL, SLIDING}:
        raise UnsupportedModelError(f"layers of type {', '.join(sorted(unknown))}")
    return found


def windows(config: Any) -> tuple[int | None, ...]:
    """The window of each layer. Layers that are not listed have the model's, if it has one."""
    window = getattr(config, "sliding_window", None)
    if window is None:
        return (None,) * int(config.num_hidden_layers)
    return tuple(int(window) if kind == SLIDING else None for kind in kinds(config))


def rope(config: Any, kind: str | None = None, *, partial: bool = False, longest: int = 0) -> Rope:
    """The rotation. transformers computes scaled ones.

    Args:
        config: of transformers.
        kind: the kind of layers, if it differs by kind.
        partial: the family may rotate a part of each head.
        longest: the longest context that will be computed, if the family knows longrope: that has
            frequencies for short contexts and for long ones. They are chosen once, because keys in
            the cache cannot be rotated again.

    Raises:
        UnsupportedModelError: its frequencies follow the length of a sequence, or are unknown.
        ModelError: heads cannot be rotated so.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters: Mapping[str, Any] = config.rope_parameters or {}
    parameters = parameters if kind is None else parameters[kind]
    name = parameters.get("rope_type", "default")
    if name not in ROPE_TYPES and not (longest and name == "longrope"):
        raise UnsupportedModelError(
            f"rope type {name} is not supported; supported are {', '.join(ROPE_TYPES)}, whose"
            " frequencies do not follow the length of a sequence"
        )
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0 and not partial:
        raise UnsupportedModelError(f"rope of a part of each head (partial {share})")
    if not 0.0 < share <= 1.0:
        raise ModelError(f"rope turns {share} of each head")
    width = head_dim(config)
    if width % 2:
        raise ModelError(f"rope turns pairs of numbers, and a head has {width}")
    if name != "default":
        more: dict[str, Any] = {} if kind is None else {"layer_type": kind}
        if name == "longrope":
            more["seq_len"] = longest
        found, scale = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), **more)
        return Rope(tuple(found.tolist()), float(scale))
    rotated = int(width * share)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    return Rope(tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()))
