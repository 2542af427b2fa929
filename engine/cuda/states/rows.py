"""The rows of a step, as all layers with states share them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engine.attention.recurrent.states import RecurrentBackend
from engine.cuda.states.chunks import chunks_of
from engine.cuda.states.layout import States
from engine.model.precision.rounding import Rounded


class Rows(NamedTuple):
    """What a step's rows are to kernels."""

    states: States
    chunks: Tensor
    """See `chunks_of`; of no meaning where there is no prompt."""


class RowsOfSteps:
    """Makes them once a step, for the first layer that asks."""

    def __init__(self, backend: RecurrentBackend) -> None:
        self._backend = backend

    def of(self, x: Tensor | Rounded) -> Rows:
        """Rows of the step that was prepared, whose layers read `x`, [T, H]."""
        backend = self._backend
        states = States(backend.step, backend.found)
        if states.step.query_starts is None:
            return Rows(states, backend.found)
        if backend.chunks is None:
            tokens = len(x if isinstance(x, Tensor) else x.values)
            backend.chunks = chunks_of(states, tokens - states.step.num_decodes)
        return Rows(states, backend.chunks)
