"""The fused form of each kind of mixer."""

from __future__ import annotations

from engine.attention.grouped import PagedGroups
from engine.cuda.mixers.attention import FusedAttention, RopeTables
from engine.cuda.mixers.base import FusedMixer
from engine.cuda.mixers.delta import FusedDelta
from engine.cuda.mixers.latent import FusedLatent
from engine.cuda.mixers.mamba import FusedMamba
from engine.cuda.mixers.short_conv import FusedShortConv
from engine.model.mixers.attention import Attention
from engine.model.mixers.base import Mixer
from engine.model.mixers.delta import DeltaRule
from engine.model.mixers.latent import LatentAttention
from engine.model.mixers.mamba import Mamba
from engine.model.mixers.short_conv import ShortConv
from engine.pool.pools import KvPools


def fused(mixer: Mixer, pools: KvPools, attention: PagedGroups, ropes: RopeTables) -> FusedMixer:
    """A layer's mixer with fused kernels."""
    if isinstance(mixer, ShortConv):
        return FusedShortConv(mixer, pools, attention)
    if isinstance(mixer, DeltaRule):
        return FusedDelta(mixer, pools, attention)
    if isinstance(mixer, Mamba):
        return FusedMamba(mixer, pools, attention)
    if isinstance(mixer, LatentAttention):
        return FusedLatent(mixer, pools, attention, ropes)
    assert isinstance(mixer, Attention)
    return FusedAttention(mixer, pools, attention, ropes)
