"""What stands behind the mixer in a layer, chosen by the layer's features.

Another kind is a class with these functions, and its line in `feed_forward`. On a GPU
`engine.cuda.forward` runs the same modules with fused kernels.

Shapes: T tokens of a step, H hidden size, I the width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import (
    Activation,
    BesideConfig,
    ExpertsConfig,
    FeedForwardConfig,
    GatedConfig,
    MlpConfig,
    ModelConfig,
)
from engine.model.experts.beside import Beside
from engine.model.experts.layer import Experts
from engine.model.linear import Build, Linear
from engine.model.places import Place, of_linear
from engine.model.precision.base import Format
from engine.model.shard import Shard
from engine.step.collective import Alone

ACTIVATIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
}


class FeedForward(Protocol):
    """One layer's feed-forward. It is an `nn.Module`."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H], with the ranks' sum."""
        ...

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """The parts of its weights, in a fixed order. `form`: the format of quantised weights."""
        ...


class Gated(nn.Module):
    """down(activation(gate) * up). Gate and up are one weight, for one product."""

    def __init__(self, config: ModelConfig, index: int, own: GatedConfig, build: Build) -> None:
        super().__init__()
        parts = build.shard.gated_parts(config, index, own)
        self.activation = own.activation
        self.gate_up = Linear(parts.gate_up, own.bias, build)
        self.down = Linear(parts.down, own.bias, build)
        self._activate = ACTIVATIONS[own.activation]
        self._collective = build.collective

    def forward(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self._collective.all_reduce(self.down(self._activate(gate) * up))

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """See `FeedForward`."""
        yield from of_linear(self.gate_up, form, shard)
        yield from of_linear(self.down, form, shard)


class Mlp(nn.Module):
    """down(relu(up)^2) (So et al. 2021, "Primer")."""

    def __init__(self, config: ModelConfig, index: int, own: MlpConfig, build: Build) -> None:
        super().__init__()
        parts = build.shard.gated_parts(config, index, own)
        self.up = Linear(parts.gate_up, own.bias, build)
        self.down = Linear(parts.down, own.bias, build)
        self._collective = build.collective

    def forward(self, x: Tensor) -> Tensor:
        """See `FeedForward`."""
        return self._collective.all_reduce(self.down(F.relu(self.up(x)).square()))

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """See `FeedForward`."""
        yield from of_linear(self.up, form, shard)
        yield from of_linear(self.down, form, shard)


def feed_forward(
    config: ModelConfig, index: int, own: FeedForwardConfig, build: Build
) -> Gated | Mlp | Experts | Beside:
    """The feed-forward of layer `index`."""
    if isinstance(own, GatedConfig | MlpConfig):
        return _plain(config, index, own, build)
    if isinstance(own, BesideConfig):
        gated = Gated(config, index, own.gated, build)
        return Beside(config, index, own, build, gated, _experts(config, index, own.experts, build))
    return _experts(config, index, own, build)


def _plain(
    config: ModelConfig, index: int, own: GatedConfig | MlpConfig, build: Build
) -> Gated | Mlp:
    if isinstance(own, MlpConfig):
        return Mlp(config, index, own, build)
    return Gated(config, index, own, build)


def _experts(config: ModelConfig, index: int, own: ExpertsConfig, build: Build) -> Experts:
    shared = None
    if own.shared is not None:
        shared = _plain(config, index, own.shared, build._replace(collective=Alone()))
    return Experts(config, index, own, build, shared)
