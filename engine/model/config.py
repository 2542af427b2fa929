"""The features of a model. `engine.model.families` reads them from a Hugging Face config.

The forward passes know features, and no names of families. What differs by layer is in
`LayerConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from engine.model.experts.config import SILU, USUAL_NAMES, ExpertNames, Gate, Routing
from engine.model.mixers.config import Kept, MixerConfig


class ModelError(Exception):
    """The model cannot be loaded or run; the message says why."""


class UnsupportedModelError(ModelError):
    """The engine does not support the architecture or one of its options."""


class Activation(StrEnum):
    """What a feed-forward does with its gate."""

    SILU = "silu"
    GELU = "gelu"
    """With the error function."""
    GELU_TANH = "gelu_tanh"
    """Its approximation by tanh."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of a layer, by their names in a checkpoint. None: the model has none there."""

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    """On the output of the mixer, before the residual is added."""
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None


@dataclass(frozen=True, slots=True)
class GatedConfig:
    """A feed-forward of three products: down(activation(gate) * up)."""

    width: int
    activation: Activation = Activation.SILU
    bias: bool = False
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Modules of the checkpoint that are gate and up together, in this order."""
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """A feed-forward of two products: down(relu(up)^2)."""

    width: int
    bias: bool = False
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"


class Reduced(NamedTuple):
    """Experts read and give fewer numbers than layers have, between two products of all tokens
    (Nemotron 3)."""

    size: int
    before: str
    """Module of the checkpoint whose product experts read."""
    after: str
    """Module of the product of what they give."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Feed-forwards, a few of which each token takes."""

    width: int
    """Width of an expert."""
    routing: Routing
    gate: Gate = SILU
    router_bias: bool = False
    bias: bool = False
    """Gate, up and down of an expert have biases."""
    shared: GatedConfig | MlpConfig | None = None
    """An expert that all tokens take."""
    shared_gate: str | None = None
    """Module whose product with a token, by sigmoid, is the factor of the shared expert's output;
    None: 1."""
    names: ExpertNames = USUAL_NAMES
    reduced: Reduced | None = None


@dataclass(frozen=True, slots=True)
class BesideConfig:
    """A gated feed-forward and experts beside it, whose outputs are added up (Gemma 4). Each has
    norms of its own, by their names in a checkpoint."""

    gated: GatedConfig
    experts: ExpertsConfig
    before_gated: str
    after_gated: str
    before_experts: str
    after_experts: str
    router_scale: str
    """Tensor of factors on what the router reads, which is normed."""
    expert_scale: str
    """Tensor of a factor for each expert."""


FeedForwardConfig = GatedConfig | MlpConfig | ExpertsConfig | BesideConfig
"""What stands behind the mixer in a layer. See `engine.model.feed_forward`."""


class LayerInputs(NamedTuple):
    """Each token has an embedding of its own for each layer (Gemma 3n)."""

    width: int
    """Numbers of one."""
    vocab_size: int
    activation: Activation


class Unread(NamedTuple):
    """Tensors of a checkpoint that are not read."""

    prefix: str
    """Prefix of their names."""
    what: str
    """As the log calls them."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The features of one layer. It may lack one of its two parts."""

    mixer: MixerConfig | None
    feed_forward: FeedForwardConfig | None
    norms: Norms = Norms()
    parallel: bool = False
    """The feed-forward reads what the mixer reads, and not its output."""
    scalar: str | None = None
    """Tensor of one number, the factor on all that leaves the layer; None: 1."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    norm_plus_one: bool = False
    """A norm multiplies by 1 + its weight."""
    norm_centred: bool = False
    """Norms subtract the mean first (Ba et al. 2016), those of layers and the last one."""
    layer_inputs: LayerInputs | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor on what a layer adds to the residual."""
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    body: str = "model"
    """Module of the checkpoint that has embedding, layers and the last norm."""
    head: str = "lm_head"
    embedding: str = "embed_tokens"
    """Module of the body that has a row for each token of the vocabulary."""
    last_norm: str = "norm"
    """Module of the body behind the last layer."""
    unread: tuple[Unread, ...] = ()
    """What a checkpoint has beside the model."""
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.layers)

    @property
    def mixers(self) -> list[MixerConfig]:
        """Mixers of the layers that have one."""
        return [layer.mixer for layer in self.layers if layer.mixer is not None]

    @property
    def keepers(self) -> dict[int, Kept]:
        """What layers keep of each token, by their indices, but those that keep nothing."""
        mixers = ((index, layer.mixer) for index, layer in enumerate(self.layers))
        found = ((index, None if mixer is None else mixer.kept) for index, mixer in mixers)
        return {index: kept for index, kept in found if kept is not None}

    @property
    def kept(self) -> Kept:
        """What is kept in group 0: in the first layer that sees all tokens, if there is one. Layers
        that see as many tokens keep the same."""
        every = [kept for kept in self.keepers.values() if not kept.state]
        found = next((kept for kept in every if kept.window is None), every[0])
        return found._replace(window=None)

    def kept_by(self, layers: Sequence[int]) -> Kept:
        """What each layer of a group keeps; for one without layers what another one does."""
        return self.keepers[layers[0]] if layers else self.kept

    @property
    def shapes_differ(self) -> bool:
        """Whether layers keep K and V of several shapes."""
        return len({kept._replace(window=None) for kept in self.keepers.values()}) > 1

    def layer_name(self, index: int, name: str) -> str:
        """The full name of a module of a layer."""
        return f"{self.body}.layers.{index}.{name}"


class WrappedConfig(ModelConfig):
    """A decoder that transformers' own code runs. Its layers are calls of attention, and nothing
    else."""


_NAMES = (
    ("model", "lm_head"),
    ("model.language_model", "lm_head"),
    ("language_model.model", "language_model.lm_head"),
    ("backbone", "lm_head"),
)
"""Body and head of checkpoints. The later ones have something beside a text part."""


def named_as(config: ModelConfig, there: Collection[str]) -> ModelConfig:
    """Returns the same model with the names of a checkpoint.

    Args:
        config: of the model.
        there: names of the checkpoint's tensors.
    """
    found = (names for names in _NAMES if f"{names[0]}.{config.last_norm}.weight" in there)
    body, head = next(found, (config.body, config.head))
    own = f"{config.body}.layers."
    unread = tuple(
        Unread(f"{body}.layers.{each.prefix.removeprefix(own)}", each.what)
        if each.prefix.startswith(own)
        else each
        for each in config.unread
    )
    apart = any(".experts.0." in name for name in there)
    layers = tuple(_apart(layer) for layer in config.layers) if apart else config.layers
    return replace(config, body=body, head=head, unread=unread, layers=layers)


def _apart(layer: LayerConfig) -> LayerConfig:
    """A layer with tensors for each expert by itself, if it has experts."""
    own = layer.feed_forward
    if not isinstance(own, ExpertsConfig) or not own.names.straight:
        return layer
    names = replace(own.names, stacked=False, behind=False, straight=False)
    return replace(layer, feed_forward=replace(own, names=names))


def read_json(file: Path) -> dict[str, Any]:
    """An object from a JSON file beside a model.

    Raises:
        ModelError: there is none.
    """
    if not file.is_file():
        raise ModelError(f"{str(file.parent)!r} is no model: it has no {file.name}")
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is no config that can be read") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is no config that can be read")
    return content
