"""The features of mixers. Families read them from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from engine.model.mixers.rope import Rope


class Kept(NamedTuple):
    """What a layer keeps of each token: K and V. Groups are made of it (`engine.groups`)."""

    kv_heads: int
    """KV heads of all ranks together."""
    head_dim: int
    """Numbers of K of one head, and as many of V."""
    window: int | None = None
    """Number of tokens that are read later, with the newest; None: all."""
    is_state: bool = False
    """K and V are what a convolution reads. They are not rounded."""


class QkNorm(StrEnum):
    """RMS norm of q and k, before rope."""

    HEAD = "head"
    """Over each head, with one weight for all heads."""
    WHOLE = "whole"
    """Over all heads together."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The features of a layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    """None: q and k are not rotated."""
    scale: float
    """Factor on the products of q and k."""
    window: int | None = None
    """Number of tokens that a position attends to, with itself; None: all before it."""
    soft_cap: float | None = None
    """Products of q and k become cap * tanh(product / cap)."""
    sinks: bool = False
    """Each head has a learned logit beside those of the tokens, which takes part of the weight."""
    qk_norm: QkNorm | None = None
    v_norm: bool = False
    """RMS norm over each head of v, without a weight."""
    v_is_k: bool = False
    """v is k as projected, before its norm and rope."""
    kv_from: int | None = None
    """The layer whose K and V are read; None: its own. Another layer's have the same shape."""
    lends: bool = False
    """Later layers read its K and V."""
    q_norm: str = "q_norm"
    """Name of the norm of q in a checkpoint; of that of k, below."""
    k_norm: str = "k_norm"
    module: str = "self_attn"
    """Name of the checkpoint's module, which has all that follows."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Modules that are q, k and v together, in this order."""
    output: str = "o_proj"
    qkv_bias: bool = False
    output_bias: bool = False

    @property
    def kept(self) -> Kept | None:
        """What a layer keeps of each token; None: nothing."""
        if self.kv_from is not None:
            return None
        return Kept(self.kv_heads, self.head_dim, self.window)

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty: they can."""
        if self.heads % ranks:
            return f"it does not divide the {self.heads} attention heads"
        if self.kv_heads % ranks and ranks % self.kv_heads:
            return f"it neither divides the {self.kv_heads} KV heads nor is a multiple of them"
        return ""


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """The features of a short convolution."""

    channels: int
    kernel: int
    """Tokens that a position reads, with itself."""
    blocks: int
    """Parts of the channels that ranks divide. Each has an even number of them."""
    bias: bool = False
    module: str = "conv"
    """Module of the checkpoint's layer that has `in_proj`, `conv` and `out_proj`."""

    @property
    def rope(self) -> None:
        """It has none."""
        return

    @property
    def kept(self) -> Kept:
        """What a layer keeps of each token."""
        return Kept(self.blocks, self.channels // self.blocks // 2, self.kernel, is_state=True)

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty: they can."""
        if self.blocks % ranks:
            return f"it does not divide the {self.blocks} blocks of a convolution's channels"
        return ""


MixerConfig = AttentionConfig | ShortConvConfig
"""What stands before the feed-forward in a layer. See `engine.model.mixers.kinds`."""
