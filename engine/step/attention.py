"""The interface of an attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Taps(NamedTuple):
    """A causal convolution of each channel over the last K tokens."""

    weight: Tensor
    """[channels, K], the newest token's last."""
    bias: Tensor | None
    """[channels]"""


class Recurrence(Protocol):
    """How a layer folds tokens into a state.

    Shapes: B sequences, L tokens, U units of this rank, N numbers of a unit's state. Inputs and
    gates are what the layer makes of tokens; `out` is a row of them each.
    """

    def step(
        self, state: Tensor, inputs: Tensor, first: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Folds a token into each of B states.

        Args:
            state: [B, U, N] float32.
            inputs: [B, ...].
            first: gates [B, ...].
            second: gates [B, ...].

        Returns:
            Out [B, ...], and the new states.
        """
        ...

    def fold(
        self, state: Tensor, inputs: Tensor, first: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Folds L tokens of a prompt into one state, [U, N] float32. As `step`, with L for B."""
        ...


class Latents(NamedTuple):
    """How K and V of heads are made of one latent of each token.

    Shapes: Hq heads, N numbers of a head's K that the latent makes, R numbers that are rotated and
    that all heads share, V numbers of a head's V, C numbers of a latent.
    """

    weight: Tensor
    """[Hq, N + V, C]: K's numbers, then V's."""
    k_dim: int
    """N."""

    @property
    def v_dim(self) -> int:
        """V."""
        return self.weight.shape[1] - self.k_dim

    def absorbed(self, q: Tensor) -> Tensor:
        """[T, Hq, N + R] -> [T, Hq, C + R]: queries whose products with latents are those of `q`
        with K."""
        tokens, heads, dim = q.shape
        rank = self.weight.shape[2]
        out = q.new_empty(tokens, heads, rank + dim - self.k_dim)
        made, key = out[..., :rank].transpose(0, 1), self.weight[:, : self.k_dim]
        torch.bmm(q[..., : self.k_dim].transpose(0, 1), key, out=made)
        out[..., rank:] = q[..., self.k_dim :]
        return out

    def values(self, latents: Tensor) -> Tensor:
        """[T, Hq, C], sums of latents by weights of the heads -> [T, Hq, V], those of V."""
        tokens, heads, _ = latents.shape
        out = latents.new_empty(tokens, heads, self.v_dim)
        value = self.weight[:, self.k_dim :].transpose(1, 2)
        torch.bmm(latents.transpose(0, 1), value, out=out.transpose(0, 1))
        return out

    def of_heads(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """[L, C + R] -> K [L, Hq, N + R] and V [L, Hq, V], by one product."""
        heads, _, rank = self.weight.shape
        made = torch.matmul(latents[:, :rank], self.weight.flatten(0, 1).T)
        made = made.view(len(latents), heads, -1)
        turned = latents[:, None, rank:].expand(-1, heads, -1)
        return torch.cat((made[..., : self.k_dim], turned), dim=-1), made[..., self.k_dim :]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """Attention of one layer, or what stands in its place."""

    scale: float
    """Factor on the products of q and k."""
    window: int | None = None
    """Number of tokens that a position sees, with itself; None: all before it."""
    soft_cap: float | None = None
    """Scaled products become cap * tanh(product / cap)."""
    sinks: Tensor | None = None
    """[Hq]: a learned logit of each head beside those of the tokens. Its part of the weight is
    lost."""
    taps: Taps | None = None
    """The layer convolves, and attends to nothing."""
    recurrence: Recurrence | None = None
    """The layer folds tokens into a state, and attends to nothing."""
    latents: Latents | None = None
    """K is a latent, and V a part of it. Heads have their own, which are made of them."""


Specs = tuple[AttentionSpec, ...]
"""By layer."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """R rows with T new tokens in all. The executor sets it once a step."""

    query_lens: NDArray[np.int32]
    """[R] on the host; equal in the first `num_decodes` rows. Backends that read no pages in place
    take only rows of one token for decode rows."""
    context_lens: NDArray[np.int32]
    """[R] on the host: tokens in KV after this step, with the new ones."""
    num_decodes: int
    page_table: Tensor
    """[R, P] int64; the scratch page beyond a row's context."""
    token_pages: Tensor
    """[T] int64: the page for each new token's K and V."""
    token_offsets: Tensor
    """[T] int64: the place of each new token in its page."""
    is_state: bool = False
    """The pages are states: the table is one of states (`engine.step.plan.GroupTable`), and tokens
    have no places."""
    others: tuple[AttentionBatch, ...] = ()
    """Batches of the same step in the groups beyond group 0. Their tables begin at the first page
    that a row reads, and their contexts count from there."""


class StepAttention(Protocol):
    """Stores the new tokens' K and V, then attends causally over each row's context."""

    name: str

    def begin(self, batch: AttentionBatch) -> None:
        """Prepares the data that all layers of the step share."""
        ...

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer. `q` [T, Hq, D], `k` and `v` [T, Hkv, D]; returns [T, Hq, D]. With latents, `q`
        has as many numbers as K of a head, and the result as many as V."""
        ...


class AttentionBackend(StepAttention, Protocol):
    """Attention over one pool."""

    def attend_ends(self, layer: int, q: Tensor, contexts: Tensor, page_table: Tensor) -> Tensor:
        """One layer, from the w last positions of S rows, each over the stored tokens up to itself.

        `q` [S * w, Hq, D], `contexts` [S] and `page_table` [S, P] int32; returns [S * w, Hq, D].
        """
        ...
