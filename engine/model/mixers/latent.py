"""Attention whose K and V are made of one latent of each token (DeepSeek-V2, arXiv 2405.04434,
section 2.1: multi-head latent attention).

A layer keeps a latent, which is normed, and beside it a part of K that is rotated and that all
heads read. What makes K and V of heads is a part of attention (`engine.step.attention.Latents`): it
may be absorbed by queries and outputs. So it is kept in the model's dtype, whatever the checkpoint
has. A rank has some heads, and every rank has the whole latent.

Shapes: T tokens of a step, H hidden size, Hq query heads of this rank, C numbers of a latent, N and
R numbers of a head's K that are made of it and that are rotated, V numbers of a head's V.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.linear import Build, Linear, RmsNorm
from engine.model.mixers.base import Step
from engine.model.mixers.config import LatentConfig
from engine.model.mixers.rope import rotate
from engine.model.places import Place, of_linear, of_norm, widened
from engine.model.precision.base import Format, WeightSlice, parameter
from engine.model.region import Range, Region
from engine.model.shard import Shard, columns
from engine.step.attention import AttentionSpec, Latents


class LatentParts(NamedTuple):
    """The weights around attention over latents."""

    q: list[WeightSlice]
    """Queries, or the latent that they are made of."""
    heads_of_q: list[WeightSlice]
    """Queries of that latent; empty: there is none."""
    kept: list[WeightSlice]
    """The latent of K and V, and the part of K that is rotated."""
    heads: list[WeightSlice]
    """K and V of the latent."""
    output: list[WeightSlice]


def parts_of(own: LatentConfig, config: ModelConfig, index: int, shard: Shard) -> LatentParts:
    """A rank's parts of the weights of layer `index`."""
    hidden, heads = config.hidden_size, shard.even(own.heads)

    def whole(name: str, rows: int) -> list[WeightSlice]:
        region = Region.whole(rows, hidden)
        return [WeightSlice(config.layer_name(index, f"{own.module}.{name}"), region)]

    def by_heads(name: str, size: int, inputs: int) -> list[WeightSlice]:
        rows = Range(heads.start * size, heads.end * size)
        region = Region.some_rows((own.heads * size, inputs), rows)
        return [WeightSlice(config.layer_name(index, f"{own.module}.{name}"), region)]

    values = Range(heads.start * own.v_dim, heads.end * own.v_dim)
    output = columns(config, index, f"{own.module}.o_proj", own.heads * own.v_dim, values)
    return LatentParts(
        q=by_heads("q_proj", own.head_dim, hidden)
        if own.q_rank is None
        else whole("q_a_proj", own.q_rank),
        heads_of_q=[] if own.q_rank is None else by_heads("q_b_proj", own.head_dim, own.q_rank),
        kept=whole("kv_a_proj_with_mqa", own.rank + own.turned),
        heads=by_heads("kv_b_proj", own.k_dim + own.v_dim, own.rank),
        output=output,
    )


class LatentAttention(nn.Module):
    """See `engine.model.mixers.base.Mixer`."""

    def __init__(self, config: ModelConfig, index: int, own: LatentConfig, build: Build) -> None:
        super().__init__()
        self.index = index
        self.own = own
        self._name = config.layer_name(index, own.module)
        self._collective = build.collective
        parts = parts_of(own, config, index, build.shard)
        self.q = Linear(parts.q, own.bias, build)
        self.q_norm: RmsNorm | None = None
        self.heads_of_q: Linear | None = None
        if own.q_rank is not None:
            self.q_norm = RmsNorm(own.q_rank, own.norm_eps, build)
            self.heads_of_q = Linear(parts.heads_of_q, False, build)
        self.kept = Linear(parts.kept, own.bias, build)
        self.kept_norm = RmsNorm(own.rank, own.norm_eps, build)
        self._heads = parts.heads[0]
        shape = build.shard.even(own.heads).size, own.k_dim + own.v_dim, own.rank
        self.heads = parameter(shape, build.dtype, build.device)
        """What makes K and V of heads."""
        self.output = Linear(parts.output, own.bias, build)

    @property
    def spec(self) -> AttentionSpec:
        """See `Mixer`."""
        return AttentionSpec(self.own.scale, latents=Latents(self.heads, self.own.k_dim))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """See `Mixer`."""
        own = self.own
        q = self._queries(x).view(len(x), -1, own.head_dim)
        latent, turned = self.kept(x)[:, None].split((own.rank, own.turned), dim=-1)
        k = torch.cat((self.kept_norm(latent), self._turned(turned, step)), dim=-1)
        q = torch.cat((q[..., : own.k_dim], self._turned(q[..., own.k_dim :], step)), dim=-1)
        out = step.attention(self.index, q, k, k[..., : own.rank])
        return self._collective.all_reduce(self.output(out.flatten(1)))

    def _queries(self, x: Tensor) -> Tensor:
        """[T, Hq * (N + R)]."""
        q: Tensor = self.q(x)
        if self.q_norm is None or self.heads_of_q is None:
            return q
        made: Tensor = self.heads_of_q(self.q_norm(q))
        return made

    def _turned(self, x: Tensor, step: Step) -> Tensor:
        """[T, heads, R], rotated."""
        cos, sin, _ = step.rotations[self.own.rope]
        return rotate(x, cos, sin, neighbours=self.own.rope.neighbours)

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """See `Mixer`."""
        yield from of_linear(self.q, form, shard)
        if self.q_norm is not None and self.heads_of_q is not None:
            yield of_norm(f"{self._name}.q_a_layernorm", self.q_norm)
            yield from of_linear(self.heads_of_q, form, shard)
        yield from of_linear(self.kept, form, shard)
        yield of_norm(f"{self._name}.kv_a_layernorm", self.kept_norm)
        yield widened(self._heads, self.heads.flatten(0, 1), form)
        yield from of_linear(self.output, form, shard)
