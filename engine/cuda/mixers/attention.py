"""Attention with fused kernels: the norms of q, k and v, rope and the stores are one."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.attention.grouped import PagedGroups
from engine.cuda import kernels
from engine.cuda.kv.fp8_store import rope_store_fp8
from engine.cuda.kv.gates import opened, ungated
from engine.cuda.kv.rope_store import HeadNorms, RopeTable, rope_store
from engine.cuda.mixers.base import RowEnds, StepTokens
from engine.model.mixers.attention import Attention
from engine.model.mixers.head_norms import HeadNorm, WholeNorm
from engine.model.mixers.rope import Rope, Ropes
from engine.model.precision.dense import Dense
from engine.model.precision.rounding import Rounded, Rounding
from engine.pool.pools import KvPools

_STORES: Final = {"fp8": rope_store_fp8}
"""Kernels that store K and V in another precision than the model's."""


class RopeTables:
    """Cos and sin of the model's ropes, with its rounding. A row is small beside a token's part of
    the pool: it is as large as K of one head in one layer, in the model's dtype."""

    def __init__(self, ropes: Ropes, like: Tensor, max_context_tokens: int) -> None:
        """`like`: has dtype and device of the tables."""
        self._ropes, self._like = ropes, like
        self._tokens = max_context_tokens
        self._made: dict[tuple[Rope | None, int], RopeTable] = {}

    def of(self, rope: Rope | None, head_dim: int) -> RopeTable:
        """The table of a rope for heads of this size. It is made once."""
        if (table := self._made.get((rope, head_dim))) is None:
            table = self._made[rope, head_dim] = self._make(rope, head_dim)
        return table

    def growth(self, rope: Rope | None) -> Tensor | None:
        """[positions]: the factors on queries, where they are not all 1."""
        if rope is None or rope.growth is None or self._tokens <= rope.growth.positions:
            return None
        positions = torch.arange(self._tokens, device=self._like.device)
        return rope.growth.at(positions).to(self._like.dtype)

    def _make(self, rope: Rope | None, head_dim: int) -> RopeTable:
        shape = self._tokens, 2, head_dim // 2
        angles = torch.zeros(shape, dtype=self._like.dtype, device=self._like.device)
        angles[:, 0] = 1.0
        if rope is None:
            return RopeTable(angles.flatten(1), 0)
        turned = len(rope.frequencies)
        self._ropes.fill(rope, angles[:, :, :turned])
        return RopeTable(angles.flatten(1), turned, rope.neighbours)


class _Made(NamedTuple):
    heads: Tensor
    """[T, (Hq + 2 Hkv) D]: q, k and v, or q alone."""
    gated: Tensor | None
    """[T, ..], the product with the gates of q (`engine.cuda.kv.gates`)."""


class FusedAttention:
    """See `FusedMixer`."""

    def __init__(
        self, module: Attention, pools: KvPools, attention: PagedGroups, ropes: RopeTables
    ) -> None:
        self._module, own = module, module.own
        self._keeper = module.index if own.kv_from is None else own.kv_from
        """The layer whose K and V it reads."""
        self._group = pools.places[self._keeper].group
        self._pool, self._layer = pools.of_layer(self._keeper)
        self._attention = attention
        self._rope = ropes.of(own.rope, own.head_dim)
        self._growth = ropes.growth(own.rope)
        self._store = _STORES.get(self._pool.precision, rope_store)
        self._head_norms = None
        if isinstance(norms := module.qk_norm, HeadNorm):
            k_norm = norms.q if norms.k is None else norms.k
            weights = norms.q.weight, k_norm.weight
            self._head_norms = HeadNorms(*weights, norms.q.eps, own.v_norm)

    @property
    def reader(self) -> Rounding | None:
        """See `FusedMixer`."""
        return self._module.qkv.reads

    @property
    def keeps(self) -> bool:
        """See `FusedMixer`."""
        return self._keeper == self._module.index

    def run(self, x: Tensor | Rounded, step: StepTokens) -> Tensor:
        """See `FusedMixer`."""
        made = self._made(x)
        if self.keeps:
            q, k, v = self._project(made.heads, step)
        else:
            q, (k, v) = self._query(made.heads, step), step.lent[self._keeper]
        return self._output(step.attend(self._keeper, q, k, v), made.gated)

    def store(self, x: Tensor | Rounded, step: StepTokens) -> None:
        """See `FusedMixer`. q is left out where it can be."""
        if isinstance(x, Tensor) and (kept := self._kept(x)) is not None:
            to = step.positions, step.stores[self._group], self._pool
            self._store(kept, self._rope, *to, self._layer, self._head_norms)
        else:
            self._project(self._made(x).heads, step)

    def _kept(self, x: Tensor) -> Tensor | None:
        """[T, 2 Hkv D]: k and v; None: they are not made without q."""
        module, own = self._module, self._module.own
        if module.qkv.adds or own.gated or own.v_is_k or isinstance(module.qk_norm, WholeNorm):
            return None
        method = module.qkv.method
        if not isinstance(method, Dense):
            return None
        return method.product_behind(x, module.heads[0] * own.head_dim, module.qkv.bias)

    def run_ends(self, x: Tensor | Rounded, step: StepTokens, ends: RowEnds) -> Tensor:
        """See `FusedMixer`."""
        made = self._made(x)
        gated = made.gated
        if self.keeps:
            q, _, _ = self._project(made.heads, step)
            q = q.index_select(0, ends.tokens)
            gated = None if gated is None else gated.index_select(0, ends.tokens)
        else:
            q = self._query(made.heads, step)
        return self._output(self._attention.attend_ends(self._keeper, q, ends.groups), gated)

    def _made(self, x: Tensor | Rounded) -> _Made:
        module = self._module
        made: Tensor = module.qkv(x)
        if not module.own.gated:
            return _Made(made, None)
        return _Made(ungated(made, module.heads[0], module.own.head_dim), made)

    def _output(self, attended: Tensor, gated: Tensor | None) -> Tensor:
        flat = attended.flatten(1)
        if gated is not None:
            flat = opened(flat, gated, self._module.own.head_dim)
        out: Tensor = self._module.output(flat)
        return out

    def _project(self, qkv: Tensor, step: StepTokens) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, with q and k rotated. k and v are also stored in the pool."""
        module, own = self._module, self._module.own
        if own.v_is_k:
            width = module.heads[1] * own.head_dim
            qkv = torch.cat((qkv, qkv[:, -width:]), dim=1)
        if isinstance(module.qk_norm, WholeNorm):
            _norm_whole(qkv, module, module.qk_norm)
        to = step.positions, step.stores[self._group], self._pool
        q, k, v = self._store(qkv, self._rope, *to, self._layer, self._head_norms)
        if own.lends:
            step.lent[module.index] = k, v
        return self._grown(q, step), k, v

    def _query(self, qkv: Tensor, step: StepTokens) -> Tensor:
        """q, rotated, where K and V are another layer's."""
        to = step.positions, step.positions, self._pool
        kept = self._layer, self._head_norms
        q, _, _ = rope_store(qkv, self._rope, *to, *kept, keeps=False)
        return self._grown(q, step)

    def _grown(self, q: Tensor, step: StepTokens) -> Tensor:
        if self._growth is None:
            return q
        return q * self._growth.index_select(0, step.positions)[:, None, None]


def _norm_whole(qkv: Tensor, module: Attention, norm: WholeNorm) -> None:
    """Normalises q and k in place."""
    heads = qkv.view(len(qkv), -1, module.own.head_dim)
    q, k, _ = torch.split(heads, list(module.heads), dim=1)
    if norm.is_alone:
        kernels.norm_parts(qkv, norm.q.weight, norm.k.weight, norm.q.eps)
        return
    for target, normed in zip((q, k), norm(q, k), strict=True):
        target.copy_(normed)
