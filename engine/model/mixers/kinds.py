"""The mixer of a layer, chosen by the layer's features. Another kind has its cases here.

On a GPU `engine.cuda.mixers` runs the same modules with fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.model.config import ModelConfig
from engine.model.linear import Build
from engine.model.mixers import attention, short_conv
from engine.model.mixers.config import MixerConfig, ShortConvConfig
from engine.model.precision.base import Part
from engine.model.shard import Shard


def mixer(
    config: ModelConfig, index: int, own: MixerConfig, build: Build
) -> attention.Attention | short_conv.ShortConv:
    """The mixer of layer `index`, with weights that are not filled yet."""
    if isinstance(own, ShortConvConfig):
        return short_conv.ShortConv(config, index, own, build)
    return attention.Attention(config, index, own, build)


def parts_of(config: ModelConfig, index: int, own: MixerConfig, shard: Shard) -> Iterator[Part]:
    """A rank's parts of the weights of its products."""
    if isinstance(own, ShortConvConfig):
        for parts in short_conv.parts_of(own, config, index, shard):
            yield from parts
        return
    for parts in attention.parts_of(own, config, index, shard):
        yield from parts
