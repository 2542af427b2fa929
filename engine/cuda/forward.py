"""The Llama family's forward pass with fused kernels, over the weights of `engine.model.llama`.

The next norm adds a layer's output to the residual, so every value goes through memory once between
two products.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.paged import PagedAttention
from engine.cuda.kernels import add_rms_norm, rms_norm
from engine.cuda.kv.fp8_store import rope_store_fp8
from engine.cuda.kv.rope_store import HeadNorms, rope_store
from engine.cuda.single_row import gated, linear
from engine.model import Model
from engine.model.llama import Layer
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


class FusedForward:
    """Runs a loaded model over a pool."""

    def __init__(
        self, model: Model, pool: KvPool, attention: PagedAttention, max_context_tokens: int
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._layers = cast("list[Layer]", list(model.layers))
        self._rope_store = _STORES.get(pool.precision, rope_store)
        self._head_norms = [_head_norms(layer) for layer in self._layers]
        self._next_norms = [*(layer.input_norm for layer in self._layers[1:]), model.norm]
        """Per layer, the norm that follows its sum."""
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
        first = self._layers[0].input_norm
        x = rms_norm(residual, first.weight, first.eps)
        for layer, norm in zip(self._layers, self._next_norms, strict=True):
            q, k, v = self._project(layer, x, positions, stores)
            if ends is None or layer is not self._layers[-1]:
                attended = self._attention.attend(layer.index, q, k, v)
            elif len(ends.tokens) == 0:
                return x[:0]
            else:
                q, residual = (t.index_select(0, ends.tokens) for t in (q, residual))
                attended = self._attention.attend_ends(
                    layer.index, q, ends.contexts, ends.page_table
                )
            x = linear(attended.flatten(1), layer.output.weight, layer.output.bias)
            x = add_rms_norm(residual, x, layer.mlp_norm.weight, layer.mlp_norm.eps)
            x = linear(gated(x, layer.gate_up), layer.down.weight, layer.down.bias)
            x = add_rms_norm(residual, x, norm.weight, norm.eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, vocab], in the model's dtype."""
        return linear(hidden, self._model.head)

    def _project(
        self, layer: Layer, x: Tensor, positions: Tensor, stores: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, with q and k rotated. k and v are also stored in the pool."""
        norms = self._head_norms[layer.index]
        qkv = linear(x, layer.qkv.weight, layer.qkv.bias)
        return self._rope_store(qkv, self._rope, positions, stores, self._pool, layer.index, norms)


def _head_norms(layer: Layer) -> HeadNorms | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return HeadNorms(layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)


def _rope_table(model: Model, max_context_tokens: int) -> Tensor:
    """[positions, D]: cos of the D / 2 angles, then sin, with the model's rounding."""
    frequencies = model.rope.frequencies
    positions = torch.arange(max_context_tokens, device=frequencies.device)
    cos, sin = model.rope(positions, model.embedding.dtype)
    half = frequencies.shape[0]
    return torch.cat((cos[:, 0, :half], sin[:, 0, :half]), dim=1).contiguous()
