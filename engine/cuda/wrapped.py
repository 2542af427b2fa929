"""The forward pass of a decoder whose code is transformers', with our products and attention.

The class launches its own kernels between ours, which a graph holds as well: its dry run has shown
that it reads no numbers on the way. K and V of a layer are stored by the kernel that rotates them
in other models. Where attention is the class's, they come rotated, so it turns them by nothing;
where it is ours, it turns them by the class's angles of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.grouped import PagedGroups
from engine.cuda import feed_forward
from engine.cuda.forward import FusedForward
from engine.cuda.kv.fp8_store import rope_store_fp8
from engine.cuda.kv.rope_store import RopeTable, rope_store
from engine.cuda.mixers.base import RowEnds
from engine.cuda.products import CudaProducts
from engine.hooks.attention import Attend
from engine.model import Decoder
from engine.model.feed_forward import Gated
from engine.model.wrapped.decoder import WrappedModel
from engine.model.wrapped.parts import Replaced
from engine.pool.pools import KvPools
from engine.step.attention import AttentionBatch


class _Paged:
    """`StepAttention` of one step: stores K and V, then attends over pages."""

    name = "paged"

    def __init__(
        self, pools: KvPools, attend: Attend, stores: Sequence[Tensor], tables: dict[int, RopeTable]
    ) -> None:
        self._pools, self._attend, self._stores, self._tables = pools, attend, stores, tables
        self._nowhere = torch.zeros_like(stores[0])
        self._rows = torch.arange(len(stores[0]), dtype=torch.int32, device=stores[0].device)
        self._angles: dict[tuple[int, int], tuple[Tensor, RopeTable]] = {}
        """Angles of this step's tokens, by the class's tensor, which is kept, and D."""

    def begin(self, batch: AttentionBatch) -> None:
        """Nothing: the backends were prepared."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `StepAttention`."""
        heads = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)
        return self._stored(layer, heads, None)

    def unturned(self, layer: int, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Turns`."""
        dim = self._pools.of_layer(layer)[0].head_dim
        if (key := (id(cos), dim)) not in self._angles:
            self._angles[key] = cos, _table(cos, sin, dim)
        return self._stored(layer, heads, self._angles[key][1])

    def _stored(self, layer: int, heads: Tensor, turns: RopeTable | None) -> Tensor:
        pool, own = self._pools.of_layer(layer)
        stores = self._stores[self._pools.places[layer].group]
        store = rope_store_fp8 if pool.precision == "fp8" else rope_store
        table, rows = (turns, self._rows) if turns else (self._tables[pool.head_dim], self._nowhere)
        return self._attend(layer, *store(heads, table, rows, stores, pool, own, None))


class WrappedForward:
    """Runs a loaded model over a pool. It makes the model's weights ready for products."""

    def __init__(self, model: WrappedModel, pools: KvPools, attention: PagedGroups) -> None:
        model.finish(CudaProducts())
        for module in model.modules():
            if isinstance(module, Replaced):
                module.run = partial(_gated, model)
        self._model, self._pools, self._attention = model, pools, attention
        dims = {pool.head_dim for pool, _ in map(pools.of_layer, pools.places)}
        self._tables = {dim: RopeTable(_unturned(dim, model), 0) for dim in dims}

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        stores: Sequence[Tensor],
        ends: RowEnds | None = None,
        hooked: Attend | None = None,
        tapped: Tensor | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """See `FusedForward`. Every layer computes all tokens."""
        assert tapped is None, "a head reads layers of our decoder"
        assert states is None, "it has one stage"
        attend = hooked or self._attention.attend
        paged = _Paged(self._pools, attend, stores, self._tables)
        hidden: Tensor = self._model(token_ids.long(), positions.long(), paged)
        return hidden if ends is None else hidden.index_select(0, ends.tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, vocab], in the model's dtype; of several ranks each has its part, although
        it has the whole head."""
        model = self._model
        logits = model.made(hidden)
        if model.shard.count == 1:
            return logits
        return logits[:, model.shard.vocab(model.config).slice].contiguous()


def _gated(model: WrappedModel, own: Gated, x: Tensor) -> Tensor:
    """[T, H] -> [T, H], with the ranks' sum."""
    out = feed_forward.run(own, feed_forward.as_read(x, feed_forward.reader_of(own)))
    assert isinstance(out, Tensor)
    return model.collective.all_reduce(out)


def _table(cos: Tensor, sin: Tensor, dim: int) -> RopeTable:
    """A row for each token of a step, of cos and sin [1, T, R] that have all pairs twice."""
    turned, half = cos.shape[-1] // 2, dim // 2
    both = (F.pad(cos[0, :, :turned], (0, half - turned), value=1.0), sin[0, :, :turned])
    angles = torch.cat((both[0], F.pad(both[1], (0, half - turned))), dim=1)
    return RopeTable(angles, turned)


def _unturned(dim: int, model: WrappedModel) -> Tensor:
    """[1, D]: the rotation by nothing."""
    weight = next(model.parameters())
    angles = torch.zeros((1, dim), dtype=weight.dtype, device=weight.device)
    angles[:, : dim // 2] = 1.0
    return angles


def forward_of(
    model: Decoder,
    pools: KvPools,
    attention: PagedGroups,
    max_context_tokens: int,
    taps: Sequence[int] = (),
) -> FusedForward | WrappedForward:
    """The forward pass of a model on the fast path. `taps`: see `FusedForward`."""
    if isinstance(model, WrappedModel):
        return WrappedForward(model, pools, attention)
    return FusedForward(model, pools, attention, max_context_tokens, taps)
