"""The mixer of a layer, chosen by the layer's features. Another kind has its cases here.

On a GPU `engine.cuda.mixers` runs the same modules with fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from engine.model.config import ModelConfig
from engine.model.linear import Build
from engine.model.mixers import attention, delta, latent, mamba, short_conv
from engine.model.mixers.config import (
    DeltaConfig,
    LatentConfig,
    MambaConfig,
    MixerConfig,
    ShortConvConfig,
)
from engine.model.precision.base import WeightSlice
from engine.model.shard import Shard


def mixer(
    config: ModelConfig, index: int, own: MixerConfig, build: Build
) -> (
    attention.Attention
    | latent.LatentAttention
    | short_conv.ShortConv
    | delta.DeltaRule
    | mamba.Mamba
):
    """The mixer of layer `index`, with weights that are not filled yet."""
    if isinstance(own, ShortConvConfig):
        return short_conv.ShortConv(config, index, own, build)
    if isinstance(own, DeltaConfig):
        return delta.DeltaRule(config, index, own, build)
    if isinstance(own, LatentConfig):
        return latent.LatentAttention(config, index, own, build)
    if isinstance(own, MambaConfig):
        return mamba.Mamba(config, index, own, build)
    return attention.Attention(config, index, own, build)


def parts_of(
    config: ModelConfig, index: int, own: MixerConfig, shard: Shard
) -> Iterator[WeightSlice]:
    """A rank's parts of the weights of its products."""
    parts: Iterable[list[WeightSlice]]
    if isinstance(own, ShortConvConfig):
        parts = short_conv.parts_of(own, config, index, shard)
    elif isinstance(own, DeltaConfig):
        # Gates are floats, and so may be cut anywhere.
        inputs, _, output = delta.parts_of(own, config, index, shard)
        parts = inputs, output
    elif isinstance(own, LatentConfig):
        parts = latent.parts_of(own, config, index, shard)
    elif isinstance(own, MambaConfig):
        parts = mamba.parts_of(own, config, index, shard)
    else:
        parts = attention.parts_of(own, config, index, shard)
    return chain.from_iterable(parts)
