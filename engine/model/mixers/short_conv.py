"""A short causal convolution with two gates (LFM2).

The input makes B, C and x. The convolution runs over B * x, each channel with taps of its own, over
the last K tokens. Its output times C is the mixer's. A layer keeps B * x of each token, as a page
keeps K and V: the first half of a block of channels as K, the second one as V. So it is a layer
with a window of K tokens, and nothing else has to know of it. A rank has some blocks.

Shapes: T tokens of a step, H hidden size, C channels of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.linear import Build, Linear
from engine.model.mixers.base import Step
from engine.model.mixers.config import ShortConvConfig
from engine.model.places import Place, of_linear, plain
from engine.model.precision.base import Format, WeightSlice, parameter
from engine.model.region import Range
from engine.model.shard import Shard, columns, stacked
from engine.step.attention import AttentionSpec, Taps


class ShortConvParts(NamedTuple):
    """The weights around the convolution."""

    gates: list[WeightSlice]
    """B, C and x."""
    output: list[WeightSlice]


def parts_of(own: ShortConvConfig, config: ModelConfig, index: int, shard: Shard) -> ShortConvParts:
    """A rank's parts of the weights of layer `index`."""
    held = _channels(own, shard)
    sizes = [(own.channels, held)] * 3
    gates = stacked(config, index, [f"{own.module}.in_proj"], sizes)
    return ShortConvParts(
        gates, columns(config, index, f"{own.module}.out_proj", own.channels, held)
    )


def _channels(own: ShortConvConfig, shard: Shard) -> Range:
    blocks, size = shard.even(own.blocks), own.channels // own.blocks
    return Range(blocks.start * size, blocks.end * size)


class ShortConv(nn.Module):
    """See `engine.model.mixers.base.Mixer`."""

    def __init__(self, config: ModelConfig, index: int, own: ShortConvConfig, build: Build) -> None:
        super().__init__()
        self.index = index
        self.own = own
        self._name = config.layer_name(index, own.module)
        self._collective = build.collective
        parts = parts_of(own, config, index, build.shard)
        self.gates = Linear(parts.gates, own.bias, build)
        self.output = Linear(parts.output, own.bias, build)
        self._held = _channels(own, build.shard)
        shape = self._held.size, 1, own.kernel
        self.taps = parameter(shape, build.dtype, build.device)
        self.bias = None
        if own.bias:
            self.bias = parameter((self._held.size,), build.dtype, build.device)

    @property
    def spec(self) -> AttentionSpec:
        """See `Mixer`."""
        return AttentionSpec(1.0, self.own.kernel, taps=Taps(self.taps.squeeze(1), self.bias))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """See `Mixer`."""
        before, after, mixed = self.gates(x).chunk(3, dim=-1)
        size = self.own.channels // self.own.blocks // 2
        first, second = (before * mixed).view(len(x), -1, 2, size).unbind(2)
        # There are no queries: what it keeps of the tokens is all that it reads.
        convolved = step.attention(self.index, first, first, second).flatten(1)
        return self._collective.all_reduce(self.output(after * convolved))

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """See `Mixer`."""
        held, whole = self._held, self.own.channels
        yield plain(f"{self._name}.conv.weight", self.taps, held, whole)
        if self.bias is not None:
            yield plain(f"{self._name}.conv.bias", self.bias, held, whole)
        yield from of_linear(self.gates, form, shard)
        yield from of_linear(self.output, form, shard)
