"""What fused mixers share that fold tokens into states: they have one product behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from engine.attention.grouped import PagedGroups
from engine.cuda.mixers.base import RowEnds, StepTokens
from engine.cuda.states.layout import Kept
from engine.cuda.states.rows import RowsOfSteps
from engine.model.linear import Linear
from engine.model.precision.rounding import Rounded
from engine.pool.pools import KvPools


class FusedFolding(ABC):
    """See `FusedMixer`. A subclass folds, and says how it takes its input."""

    keeps = True

    def __init__(self, output: Linear, index: int, pools: KvPools, attention: PagedGroups) -> None:
        self._output = output
        self._kept = Kept(*pools.state_of(index))
        self._rows = RowsOfSteps(attention.states(pools.places[index].group))

    def run(self, x: Tensor | Rounded, step: StepTokens) -> Tensor:
        """See `FusedMixer`."""
        out: Tensor = self._output(self._folded(x))
        return out

    def store(self, x: Tensor | Rounded, step: StepTokens) -> None:
        """See `FusedMixer`."""
        self._folded(x)

    def run_ends(self, x: Tensor | Rounded, step: StepTokens, ends: RowEnds) -> Tensor:
        """See `FusedMixer`."""
        out: Tensor = self._output(self._folded(x).index_select(0, ends.tokens))
        return out

    @abstractmethod
    def _folded(self, x: Tensor | Rounded) -> Tensor:
        """[T, numbers of this rank's heads], with gates and norms."""
