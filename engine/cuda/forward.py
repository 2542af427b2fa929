"""The forward pass with fused kernels, over the weights of `engine.model.decoder`.

The next norm adds a layer's output to the residual, so every value goes through memory once between
two products.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.paged import PagedAttention
from engine.cuda import feed_forward, kernels
from engine.cuda.feed_forward import as_read
from engine.cuda.kv.fp8_store import rope_store_fp8
from engine.cuda.kv.rope_store import HeadNorms, rope_store
from engine.cuda.products import CudaProducts
from engine.cuda.products.rounding import add_rms_norm_rounded, rms_norm_rounded
from engine.model import Model
from engine.model.decoder import Layer
from engine.model.head_norms import HeadNorm
from engine.model.linear import RmsNorm
from engine.model.precision.rounding import Rounded, Rounding
from engine.pages.kv_pool import KvPool

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


class _Next(NamedTuple):
    norm: RmsNorm | None
    reader: Rounding | None
    """How the product after the norm rounds its input."""


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
        self._nexts = [
            _Next(layer.before_attention, layer.qkv.method.input) for layer in self._layers
        ]
        self._nexts.append(_Next(model.norm, None))
        """The norm before each layer and before the head, and who reads it."""
        self._rope = _rope_table(model, max_context_tokens)

    def hidden(
        self, token_ids: Tensor, positions: Tensor, stores: Tensor, ends: RowEnds | None = None
    ) -> Tensor:
        """[T] int32 ids at [T] positions, stored at [T] places of the pool -> [T, H].

        With `ends` the result is [S, H] of those tokens only. In the last layer only K and V of the
        other tokens are read later, so the rest of their work is left out.
        The attention backend must have been prepared for this step.
        """
        residual = F.embedding(token_ids, self._model.embedding)
        norm, reader = self._nexts[0]
        x = _norm(residual, norm, reader)
        for layer, (norm, next_reader) in zip(self._layers, self._nexts[1:], strict=True):
            q, k, v = self._project(layer, x, positions, stores)
            if ends is None or layer is not self._layers[-1]:
                attended = self._attention.attend(layer.index, q, k, v)
            elif len(ends.tokens) == 0:
                return residual[:0]
            else:
                q, residual = (t.index_select(0, ends.tokens) for t in (q, residual))
                attended = self._attention.attend_ends(
                    layer.index, q, ends.contexts, ends.page_table
                )
            out = layer.output(as_read(attended.flatten(1), layer.output.method.input))
            reader = feed_forward.reader_of(layer.feed_forward)
            x = _add_norm(residual, out, layer.before_feed_forward, reader)
            out = feed_forward.run(layer.feed_forward, x)
            x = _add_norm(residual, out, norm, next_reader)
        assert isinstance(x, Tensor)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, vocab], in the model's dtype."""
        return self._products.linear(hidden, self._model.head, None)

    def _project(
        self, layer: Layer, x: Tensor | Rounded, positions: Tensor, stores: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, with q and k rotated. k and v are also stored in the pool."""
        norms = self._head_norms[layer.index]
        qkv = layer.qkv(x)
        return self._rope_store(qkv, self._rope, positions, stores, self._pool, layer.index, norms)


def _norm(x: Tensor, norm: RmsNorm | None, reader: Rounding | None) -> Tensor | Rounded:
    assert norm is not None
    if reader is None:
        return kernels.rms_norm(x, norm.weight, norm.eps)
    return rms_norm_rounded(x, norm.weight, norm.eps, reader)


def _add_norm(
    residual: Tensor, x: Tensor, norm: RmsNorm | None, reader: Rounding | None
) -> Tensor | Rounded:
    """Adds `x` to `residual` in place; returns the norm of the sum."""
    assert norm is not None
    if reader is None:
        return kernels.add_rms_norm(residual, x, norm.weight, norm.eps)
    return add_rms_norm_rounded(residual, x, norm.weight, norm.eps, reader)


def _head_norms(layer: Layer) -> HeadNorms | None:
    if not isinstance(norms := layer.qk_norm, HeadNorm):
        return None
    return HeadNorms(norms.q.weight, norms.k.weight, norms.q.eps)


def _rope_table(model: Model, max_context_tokens: int) -> Tensor:
    """[positions, D]: cos of the D / 2 angles, then sin, with the model's rounding."""
    (rope,) = model.ropes.frequencies
    positions = torch.arange(max_context_tokens, device=model.embedding.device)
    cos, sin = model.ropes.rotation(rope, positions, model.embedding.dtype)
    half = len(rope.frequencies)
    return torch.cat((cos[:, 0, :half], sin[:, 0, :half]), dim=1).contiguous()
