"""A short convolution with fused kernels: the gates, the store and the convolution are one."""

from __future__ import annotations

from torch import Tensor

from engine.attention.grouped import PagedGroups
from engine.cuda.kv.short_conv import short_conv
from engine.cuda.mixers.base import RowEnds, StepTokens
from engine.model.mixers.short_conv import ShortConv
from engine.model.precision.rounding import Rounded, Rounding
from engine.pool.pools import KvPools


class FusedShortConv:
    """See `FusedMixer`."""

    keeps = True

    def __init__(self, module: ShortConv, pools: KvPools, attention: PagedGroups) -> None:
        self._module = module
        self._group = pools.places[module.index].group
        self._pool, self._layer = pools.of_layer(module.index)
        self._attention = attention
        taps = module.spec.taps
        assert taps is not None
        self._taps = taps

    @property
    def reader(self) -> Rounding | None:
        """See `FusedMixer`."""
        return self._module.gates.method.input

    def run(self, x: Tensor | Rounded, step: StepTokens) -> Tensor:
        """See `FusedMixer`."""
        out: Tensor = self._module.output(self._convolved(x, step))
        return out

    def store(self, x: Tensor | Rounded, step: StepTokens) -> None:
        """See `FusedMixer`."""
        self._convolved(x, step)

    def run_ends(self, x: Tensor | Rounded, step: StepTokens, ends: RowEnds) -> Tensor:
        """See `FusedMixer`."""
        convolved = self._convolved(x, step).index_select(0, ends.tokens)
        out: Tensor = self._module.output(convolved)
        return out

    def _convolved(self, x: Tensor | Rounded, step: StepTokens) -> Tensor:
        rows, stores = self._attention.step(self._group), step.stores[self._group]
        gates: Tensor = self._module.gates(x)
        return short_conv(gates, self._pool, self._layer, rows, stores, self._taps)
