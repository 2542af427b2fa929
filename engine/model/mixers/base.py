"""What a layer's mixer does.

Shapes: T tokens of a step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.model.mixers.rope import Rotations
from engine.model.places import Place
from engine.model.precision.base import Format
from engine.model.shard import Shard
from engine.step.attention import AttentionSpec, StepAttention


class Step(NamedTuple):
    """What all layers of a step read."""

    rotations: Rotations
    attention: StepAttention
    lent: dict[int, tuple[Tensor, Tensor]]
    """K and V of the step's tokens, [T, Hkv, D] each, of layers that lend them."""
    inputs: Tensor | None = None
    """[T, layers, P], what the layers read of the tokens themselves, where the model has it."""


class Mixer(Protocol):
    """One layer's mixer. It is an `nn.Module`."""

    @property
    def spec(self) -> AttentionSpec:
        """Its attention."""
        ...

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """[T, H] -> [T, H], with the ranks' sum."""
        ...

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """The parts of its weights, in a fixed order. `form`: the format of quantised weights."""
        ...
