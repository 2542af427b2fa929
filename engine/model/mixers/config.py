"""The features of mixers. Families read them from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from engine.model.mixers.rope import Rope

GRID = 64
"""Tokens of a prompt that a recurrence takes at once. For the delta rule it is the number of all
who have published kernels, and of transformers."""


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
    state: int = 0
    """Numbers of the state of a unit, into which the layer folds all tokens; then `kv_heads` are
    the units. 0: it keeps K and V."""
    grid: int = 0
    """Tokens behind multiples of which a state may be cut (`engine.groups.spec.State`)."""
    values: int | None = None
    """V is the first so many numbers of K, which is a latent (`LatentConfig`); None: V lies beside
    K."""

    @property
    def numbers(self) -> int:
        """Numbers of a token."""
        return self.kv_heads * self.head_dim * (2 if self.values is None else 1)


class QkNorm(StrEnum):
    """RMS norm of q and k, before rope."""

    HEAD = "head"
    """Over each head, with one weight for all heads."""
    WHOLE = "whole"
    """Over all heads together."""


@dataclass(frozen=True, slots=True)
class OutputGate:
    """Gates of a product of their own, on what heads have read."""

    name: str
    """Name of the module of the product."""
    by_head: bool = False
    """One for each head; else one for each number of it."""
    softplus: bool = False
    """They are softplus of the product; else its sigmoid."""


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
    gated: bool = False
    """What a head has read is times the sigmoid of a gate, which stands behind its q in the
    checkpoint's module."""
    gate: OutputGate | None = None
    norm_behind: bool = False
    """q and k are normed behind rope, and not before."""
    qkv_bias: bool = False
    output_bias: bool = False
    inputs: int | None = None
    """Numbers of a token that q, k and v are made of; None: the hidden size."""

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


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """The features of a gated delta rule."""

    key_heads: int
    value_heads: int
    """A multiple of the key heads. Value heads that are neighbours share one."""
    key_dim: int
    """Numbers of a key head, and of a query head, of which there are as many."""
    value_dim: int
    kernel: int
    """Tokens that the convolution of a position reads, with itself."""
    by_head: bool = False
    """The checkpoint's projections have all of a key head side by side. Else they have q, k, v and
    the gates one behind the other."""
    module: str = "linear_attn"

    @property
    def rope(self) -> None:
        """It has none."""
        return

    @property
    def channels(self) -> int:
        """Channels of the convolution that belong to a key head: its q, k and values."""
        return 2 * self.key_dim + self.values

    @property
    def values(self) -> int:
        """Numbers of the values of a key head."""
        return self.value_heads // self.key_heads * self.value_dim

    @property
    def kept(self) -> Kept:
        """What a layer keeps: the inputs that the convolution reads later, and the rule's
        matrices."""
        numbers = (self.kernel - 1) * self.channels + self.key_dim * self.values
        return Kept(self.key_heads, 0, state=numbers, grid=GRID)

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty: they can."""
        if self.key_heads % ranks:
            return f"it does not divide the {self.key_heads} key heads of a linear attention"
        return ""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The features of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). K and V of all
    heads are made of one latent of each token, and a part of K that is rotated is shared by all."""

    heads: int
    q_rank: int | None
    """Numbers of the latent that makes the queries; None: they are made of the input."""
    rank: int
    """Numbers of the latent that makes K and V."""
    k_dim: int
    """Numbers of a head's K that the latent makes."""
    v_dim: int
    rope: Rope
    scale: float
    """Factor on the products of q and k."""
    norm_eps: float
    """Epsilon of the norms of both latents."""
    bias: bool = False
    """What makes the latents, and the output, have biases."""
    module: str = "self_attn"

    @property
    def turned(self) -> int:
        """Numbers of a head's K, and of its q, that are rotated."""
        return 2 * len(self.rope.frequencies)

    @property
    def head_dim(self) -> int:
        """Numbers of a head's q and K."""
        return self.k_dim + self.turned

    @property
    def kept(self) -> Kept:
        """What a layer keeps of each token."""
        return Kept(1, self.rank + self.turned, values=self.rank)

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty: they can."""
        return f"it does not divide the {self.heads} attention heads" if self.heads % ranks else ""


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """The features of a Mamba-2 layer."""

    heads: int
    head_dim: int
    groups: int
    """Heads that are neighbours share B and C: so many sets of these."""
    state_dim: int
    """Numbers of B, and of C."""
    kernel: int
    """Tokens that the convolution of a position reads, with itself."""
    units: int
    """Parts of the state that ranks divide. Each has some heads of one group."""
    least_step: float
    """Bounds of the time steps."""
    most_step: float
    conv_bias: bool
    bias: bool
    """The projections have biases."""
    module: str = "mamba"

    @property
    def rope(self) -> None:
        """It has none."""
        return

    @property
    def values(self) -> int:
        """Numbers of the heads of a unit."""
        return self.heads // self.units * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution that a unit has: its heads', and B and C of its group."""
        return self.values + 2 * self.state_dim

    @property
    def kept(self) -> Kept:
        """What a layer keeps: the inputs that the convolution reads later, and the heads'
        matrices."""
        numbers = (self.kernel - 1) * self.channels + self.state_dim * self.values
        return Kept(self.units, 0, state=numbers, grid=GRID)

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty: they can."""
        if self.units % ranks:
            return f"it does not divide the {self.units} units of a Mamba layer's heads"
        if self.groups % ranks and ranks % self.groups:
            return f"it neither divides the {self.groups} Mamba groups nor is a multiple of them"
        return ""


MixerConfig = AttentionConfig | LatentConfig | ShortConvConfig | DeltaConfig | MambaConfig
"""What stands before the feed-forward in a layer. See `engine.model.mixers.kinds`."""
