"""The fused form of each kind of mixer."""

from __future__ import annotations

from engine.attention.paged import PagedAttention
from engine.cuda.mixers.attention import FusedAttention, RopeTables
from engine.cuda.mixers.base import FusedMixer
from engine.model.mixers.attention import Attention
from engine.model.mixers.base import Mixer
from engine.pool.kv_pool import KvPool


def fused(mixer: Mixer, pool: KvPool, attention: PagedAttention, ropes: RopeTables) -> FusedMixer:
    """A layer's mixer with fused kernels."""
    assert isinstance(mixer, Attention)
    return FusedAttention(mixer, pool, attention, ropes)
