"""The forward pass with fused kernels, over the weights of `engine.model.decoder`.

The next norm adds a layer's output to the residual, so every value goes through memory once between
two products.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.attention.paged import PagedAttention
from engine.cuda import feed_forward, kernels
from engine.cuda.joining import Join, entered, joiner
from engine.cuda.kv.fp8_store import rope_store_fp8
from engine.cuda.kv.rope_store import HeadNorms, RopeTable, rope_store
from engine.cuda.products import CudaProducts
from engine.hooks.attention import Attend
from engine.model import Model
from engine.model.config import Rope
from engine.model.decoder import Layer
from engine.model.head_norms import HeadNorm, WholeNorm
from engine.model.precision.rounding import Rounded
from engine.pool.kv_pool import KvPool

_STORES = {"fp8": rope_store_fp8}
"""Kernels that store K and V in another precision than the model's."""


class RowEnds(NamedTuple):
    """The last tokens of S rows."""

    tokens: Tensor
    """[S] int32, indices among the step's tokens."""
    contexts: Tensor
    """[S] int32, tokens of the row up to its last one."""
    page_table: Tensor
    """[S, P] int32."""


class FusedForward:
    """Runs a loaded model over a pool. It makes the model's weights ready for products."""

    def __init__(
        self, model: Model, pool: KvPool, attention: PagedAttention, max_context_tokens: int
    ) -> None:
        self._products = CudaProducts()
        model.finish(self._products)
        self._model = model
        self._pool = pool
        self._attention = attention
        self._layers = cast("list[Layer]", list(model.layers))
        self._rope_store = _STORES.get(pool.precision, rope_store)
        self._head_norms = [_head_norms(layer) for layer in self._layers]
        self._joins = [_joins_of(layer, model) for layer in self._layers]
        self._joined = joiner(model.collective)
        first = self._layers[0]
        self._entry = Join(None, first.before_attention, first.qkv.method.input, 1.0)
        self._ropes = {
            rope: _rope_table(model, rope, max_context_tokens)
            for rope in {layer.own.rope for layer in self._layers}
        }

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        stores: Tensor,
        ends: RowEnds | None = None,
        hooked: Attend | None = None,
    ) -> Tensor:
        """[T] int32 ids at [T] positions, stored at [T] places of the pool -> [T, H].

        With `ends` the result is [S, H] of those tokens only. In the last layer only K and V of the
        other tokens are read later, so the rest of their work is left out.
        With `hooked`, hooks are around attention, and every layer computes all tokens. Else the
        attention backend must have been prepared for this step.
        """
        attend = self._attention.attend if hooked is None else hooked
        residual = self._model.embed(token_ids)
        x = entered(residual, self._entry)
        for layer, (to_feed_forward, to_next) in zip(self._layers, self._joins, strict=True):
            q, k, v = self._project(layer, x, positions, stores)
            if ends is None or hooked is not None or layer is not self._layers[-1]:
                attended = attend(layer.index, q, k, v)
            elif len(ends.tokens) == 0:
                return residual[:0]
            else:
                q, residual = (t.index_select(0, ends.tokens) for t in (q, residual))
                attended = self._attention.attend_ends(
                    layer.index, q, ends.contexts, ends.page_table
                )
            out = layer.output(attended.flatten(1))
            x = self._joined(residual, out, to_feed_forward)
            out = feed_forward.run(layer.feed_forward, x)
            x = self._joined(residual, out, to_next)
        assert isinstance(x, Tensor)
        return x if ends is None or hooked is None else x.index_select(0, ends.tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, vocab], in the model's dtype."""
        return self._model.shaped(self._products.linear(hidden, self._model.head, None))

    def _project(
        self, layer: Layer, x: Tensor | Rounded, positions: Tensor, stores: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, with q and k rotated. k and v are also stored in the pool."""
        norms, rope = self._head_norms[layer.index], self._ropes[layer.own.rope]
        qkv = layer.qkv(x)
        if isinstance(layer.qk_norm, WholeNorm):
            _norm_whole(qkv, layer, layer.qk_norm)
        return self._rope_store(qkv, rope, positions, stores, self._pool, layer.index, norms)


def _joins_of(layer: Layer, model: Model) -> tuple[Join, Join]:
    """Behind its attention, and behind its feed-forward."""
    factor, following = model.config.residual_scale, layer.index + 1
    if following < len(model.layers):
        after = cast("Layer", model.layers[following])
        norm, reader = after.before_attention, after.qkv.method.input
    else:
        norm, reader = model.norm, None
    own = feed_forward.reader_of(layer.feed_forward)
    return (
        Join(layer.after_attention, layer.before_feed_forward, own, factor),
        Join(layer.after_feed_forward, norm, reader, factor),
    )


def _norm_whole(qkv: Tensor, layer: Layer, norm: WholeNorm) -> None:
    """Normalises q and k in place."""
    heads = qkv.view(len(qkv), -1, layer.head_dim)
    q, k, _ = torch.split(heads, list(layer.heads), dim=1)
    if norm.is_alone:
        kernels.norm_parts(qkv, norm.q.weight, norm.k.weight, norm.q.eps)
        return
    for target, normed in zip((q, k), norm(q, k), strict=True):
        target.copy_(normed)


def _head_norms(layer: Layer) -> HeadNorms | None:
    if not isinstance(norms := layer.qk_norm, HeadNorm):
        return None
    return HeadNorms(norms.q.weight, norms.k.weight, norms.q.eps)


def _rope_table(model: Model, rope: Rope | None, max_context_tokens: int) -> RopeTable:
    """Cos and sin of a rope, with the model's rounding. A row is small beside a token's part of the
    pool: it is as large as K of one head in one layer, in the model's dtype."""
    device, dtype = model.embedding.device, model.embedding.dtype
    half = model.config.head_dim // 2
    turned = 0 if rope is None else len(rope.frequencies)
    angles = torch.zeros(max_context_tokens, 2, half, dtype=dtype, device=device)
    angles[:, 0] = 1.0
    if rope is not None:
        model.ropes.fill(rope, angles[:, :, :turned])
    return RopeTable(angles.flatten(1), turned)
