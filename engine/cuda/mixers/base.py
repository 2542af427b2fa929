"""What the fused forward pass asks of a layer's mixer.

Shapes: T tokens of a step, H hidden size, S rows whose last tokens alone are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.attention.grouped import GroupEnds
from engine.hooks.attention import Attend
from engine.model.precision.rounding import Rounded, Rounding


class RowEnds(NamedTuple):
    """The last tokens of S rows."""

    tokens: Tensor
    """[S] int32, indices among the step's tokens."""
    groups: Sequence[GroupEnds]
    """Their rows, in each group of layers."""


class StepTokens(NamedTuple):
    """The T tokens of a step."""

    positions: Tensor
    """[T] int32."""
    stores: Sequence[Tensor]
    """[T] int32, their places in the pool of each group."""
    attend: Attend
    """Attention of this step."""


class FusedMixer(Protocol):
    """A mixer of `engine.model.mixers` with fused kernels."""

    @property
    def reader(self) -> Rounding | None:
        """How it takes its input; None: in the model's dtype."""
        ...

    def run(self, x: Tensor | Rounded, step: StepTokens) -> Tensor:
        """[T, H] in the form of `reader` -> [T, H], this rank's part."""
        ...

    def store(self, x: Tensor | Rounded, step: StepTokens) -> None:
        """Keeps of the tokens what later ones read, and no more."""
        ...

    def run_ends(self, x: Tensor | Rounded, step: StepTokens, ends: RowEnds) -> Tensor:
        """As `run` -> [S, H] of those tokens."""
        ...
