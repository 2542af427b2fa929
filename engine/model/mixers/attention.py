"""Attention over K and V of all tokens before, or of a window of them.

The three projections are one weight, for one product. A rank has some query heads, and the KV heads
that they read: with more ranks than KV heads, several ranks hold the same one.

Shapes: T tokens of a step, H hidden size, Hq query heads, Hkv KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.linear import Build, Linear
from engine.model.mixers.base import Step
from engine.model.mixers.config import AttentionConfig
from engine.model.mixers.head_norms import QK_NORMS, HeadNorm, WholeNorm
from engine.model.mixers.rope import rotate
from engine.model.places import Place, of_linear, plain
from engine.model.precision.base import Format, WeightSlice, parameter
from engine.model.region import Range
from engine.model.shard import Shard, columns, stacked
from engine.step.attention import AttentionSpec


class AttentionParts(NamedTuple):
    """The weights around attention."""

    qkv: list[WeightSlice]
    output: list[WeightSlice]
    gate: list[WeightSlice]
    """None, if gates have no product of their own."""


def parts_of(own: AttentionConfig, config: ModelConfig, index: int, shard: Shard) -> AttentionParts:
    """A rank's parts of the weights of layer `index`."""
    dim = own.head_dim
    q, kv = own.heads * dim, own.kv_heads * dim
    heads, kv_heads = (
        Range(held.start * dim, held.end * dim)
        for held in (shard.even(own.heads), shard.shared(own.kv_heads))
    )
    # One of a name's own, or one name for all.
    products = 1 if own.kv_from is not None else 2 if own.v_is_k else 3
    both = 1 + own.gated
    first = both * q, Range(both * heads.start, both * heads.end)
    sizes = [first, (kv, kv_heads), (kv, kv_heads)][:products]
    names = [f"{own.module}.{name}" for name in own.qkv[:products]]
    output = f"{own.module}.{own.output}"
    gate: list[WeightSlice] = []
    if own.gate is not None:
        each = 1 if own.gate.by_head else dim
        rows = Range(heads.start // dim * each, heads.end // dim * each)
        gate = stacked(config, index, [f"{own.module}.{own.gate.name}"], [(own.heads * each, rows)])
    return AttentionParts(
        stacked(config, index, names, sizes, own.inputs),
        columns(config, index, output, q, heads),
        gate,
    )


class Attention(nn.Module):
    """See `engine.model.mixers.base.Mixer`."""

    def __init__(self, config: ModelConfig, index: int, own: AttentionConfig, build: Build) -> None:
        super().__init__()
        self.index = index
        self.own = own
        """The features of this layer's."""
        shard = build.shard
        heads, kv_heads = shard.even(own.heads).size, shard.shared(own.kv_heads).size
        self.heads = (heads, kv_heads, kv_heads)
        """Heads of this rank: q, k and v."""
        self._eps = config.norm_eps
        self._name = config.layer_name(index, own.module)
        self._collective = build.collective
        self.qk_norm: HeadNorm | WholeNorm | None = None
        if own.qk_norm is not None:
            self.qk_norm = QK_NORMS[own.qk_norm](own, config, build)
        parts = parts_of(own, config, index, shard)
        self.qkv = Linear(parts.qkv, own.qkv_bias, build)
        self.output = Linear(parts.output, own.output_bias, build)
        self.gate = Linear(parts.gate, False, build) if parts.gate else None
        self.sinks = parameter((heads,), build.dtype, build.device) if own.sinks else None

    @property
    def spec(self) -> AttentionSpec:
        """See `Mixer`."""
        own = self.own
        return AttentionSpec(own.scale, own.window, own.soft_cap, self.sinks)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """See `Mixer`."""
        own, heads = self.own, self.qkv(x).view(len(x), -1, self.own.head_dim)
        gate = None
        if own.gated:
            heads, gate = self._ungated(heads)
        if own.kv_from is None:
            q, k, v = self._projected(heads, step)
        else:
            q, (k, v) = self._query(heads, step), step.lent[own.kv_from]
        if own.lends:
            step.lent[self.index] = k, v
        # Of another layer they are stored once more, as they are: the step reads its own tokens.
        index = self.index if own.kv_from is None else own.kv_from
        read = step.attention(index, q, k, v)
        if gate is not None:
            read = read * gate.sigmoid()
        if self.gate is not None:
            read = read * self._opened(self.gate(x))
        return self._collective.all_reduce(self.output(read.flatten(1)))

    def _opened(self, gates: Tensor) -> Tensor:
        """[T, Hq, 1 or D], of gates that have a product of their own."""
        gates = gates.view(len(gates), self.heads[0], -1)
        assert self.own.gate is not None
        if self.own.gate.softplus:
            return F.softplus(gates.float()).to(gates.dtype)
        return gates.sigmoid()

    def _ungated(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        """Heads without the gates of q, and these, [T, Hq, D]."""
        both = 2 * self.heads[0]
        q, gate = torch.unflatten(heads[:, :both], 1, (-1, 2)).unbind(2)
        return torch.cat((q, heads[:, both:]), dim=1), gate

    def _projected(self, heads: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        own = self.own
        sizes = list(self.heads[: 2 if own.v_is_k else 3])
        q, k, *rest = torch.split(heads, sizes, dim=1)
        v = rest[0] if rest else k
        if own.v_norm:
            v = _unweighted(v, self._eps)
        if own.norm_behind:
            q, k = self._turned(q, step, grows=True), self._turned(k, step)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        if not own.norm_behind:
            q, k = self._turned(q, step, grows=True), self._turned(k, step)
        return q, k, v

    def _query(self, heads: Tensor, step: Step) -> Tensor:
        if isinstance(self.qk_norm, HeadNorm):
            heads = self.qk_norm.q(heads)
        return self._turned(heads, step, grows=True)

    def _turned(self, x: Tensor, step: Step, *, grows: bool = False) -> Tensor:
        if (rope := self.own.rope) is None:
            return x
        cos, sin, growth = step.rotations[rope]
        x = rotate(x, cos, sin, neighbours=rope.neighbours)
        return x if growth is None or not grows else x * growth

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """See `Mixer`."""
        if self.qk_norm is not None:
            yield from self.qk_norm.places(self._name)
        if self.sinks is not None:
            heads = shard.even(self.own.heads)
            yield plain(f"{self._name}.sinks", self.sinks, heads, whole=self.own.heads)
        yield from of_linear(self.qkv, form, shard)
        yield from of_linear(self.output, form, shard)
        if self.gate is not None:
            yield from of_linear(self.gate, form, shard)


def _unweighted(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)
