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
    lent: dict[int, tuple[Tensor, Tensor]]
    """K and V that later layers read, by the layer that made them."""
    inputs: Tensor | None
    """[T, layers, numbers]: see `engine.model.decoder.Inputs`."""

    def ends(self, ends: RowEnds) -> StepTokens:
        """The S last ones of rows. Their stores and K and V are not among it."""
        inputs = None if self.inputs is None else self.inputs.index_select(0, ends.tokens)
        positions = self.positions.index_select(0, ends.tokens)
        return self._replace(positions=positions, stores=(), lent={}, inputs=inputs)


class FusedMixer(Protocol):
    """A mixer of `engine.model.mixers` with fused kernels."""

    @property
    def reader(self) -> Rounding | None:
        """How it takes its input; None: in the model's dtype."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything of the tokens."""
        ...

    def run(self, x: Tensor | Rounded, step: StepTokens) -> Tensor:
        """[T, H] in the form of `reader` -> [T, H], this rank's part."""
        ...

    def store(self, x: Tensor | Rounded, step: StepTokens) -> None:
        """Keeps of the tokens what later ones read, and no more."""
        ...

    def run_ends(self, x: Tensor | Rounded, step: StepTokens, ends: RowEnds) -> Tensor:
        """As `run` -> [S, H] of those tokens. One that keeps nothing gets these alone: `x` is
        [S, H], and `step` has them."""
        ...
