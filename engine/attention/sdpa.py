"""Attention with PyTorch's own operators: runs everywhere, and is the reference for the others.

Decode rows are one batch: their pages are gathered to the longest row's length and the rest is
masked. Prompt rows go one by one; one that begins at position 0 needs no gather at all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.base import AttentionBatch
from engine.kv_pool import KvPool


class _PromptRow(NamedTuple):
    """A row of several tokens."""

    first_token: int
    query_len: int
    context_len: int
    pages: Tensor
    """[P] int64, just those that hold context."""


class SdpaBackend:
    """`AttentionBackend` over `scaled_dot_product_attention` and batched products."""

    name = "sdpa"

    def __init__(self, pool: KvPool, windows: tuple[int | None, ...]) -> None:
        self._pool = pool
        self._windows = windows
        """Per layer: tokens that a position sees, itself included; None: all before it."""
        self._device = pool.tensor.device
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def begin(self, batch: AttentionBatch) -> None:
        """Keeps the step's rows; masks are made when a layer first wants them."""
        self._batch = batch
        self._masks = {}
        self._prompt_rows = []
        first = batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            query_len, context_len = int(batch.query_lens[row]), int(batch.context_lens[row])
            used = -(-context_len // self._pool.page_size)
            pages = batch.page_table[row, :used]
            self._prompt_rows.append(_PromptRow(first, query_len, context_len, pages))
            first += query_len
        decoding = batch.context_lens[: batch.num_decodes]
        used = -(-int(decoding.max(initial=1)) // self._pool.page_size)
        self._decode_pages = batch.page_table[: batch.num_decodes, :used]
        self._decode_lens = torch.from_numpy(decoding).to(self._device)[:, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        batch, kv = self._batch, self._pool.layer_kv(layer)
        kv[batch.token_pages, :, :, batch.token_offsets] = torch.stack((k, v), dim=2)
        out = torch.empty_like(q)
        if batch.num_decodes:
            decodes = slice(0, batch.num_decodes)
            out[decodes] = self._decode(kv, q[decodes], self._windows[layer])
        for index, row in enumerate(self._prompt_rows):
            new = slice(row.first_token, row.first_token + row.query_len)
            out[new] = self._prompt(kv, index, q[new], k[new], v[new], self._windows[layer])
        return out

    # -- decode ---------------------------------------------------------------------------------

    def _decode(self, kv: Tensor, q: Tensor, window: int | None) -> Tensor:
        """q [B, Hq, D]. The query heads of a group share one product with their KV head."""
        keys, values = self._gather(kv, self._decode_pages)
        rows, heads, dim = q.shape
        grouped = q.view(rows, keys.shape[1], -1, dim)
        logits = torch.matmul(grouped * dim**-0.5, keys.transpose(-1, -2))
        logits = logits.masked_fill_(self._decode_mask(window), float("-inf"))
        weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, values).view(rows, heads, dim)

    def _gather(self, kv: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of `pages` [B, P], each [B, Hkv, P * page_size, D]."""
        rows, width = pages.shape
        flat = kv.permute(2, 1, 0, 3, 4)[:, :, pages.reshape(-1)]
        both = flat.reshape(2, kv.shape[1], rows, width * kv.shape[3], kv.shape[4])
        keys, values = both.transpose(1, 2)
        return keys, values

    def _decode_mask(self, window: int | None) -> Tensor:
        """[B, 1, 1, L], True where a row must not look."""
        mask = self._masks.get((-1, window))
        if mask is None:
            length = self._decode_pages.shape[1] * self._pool.page_size
            at = torch.arange(length, device=self._device)
            mask = at >= self._decode_lens
            if window is not None:
                mask |= at < self._decode_lens - window
            mask = self._masks[-1, window] = mask[:, None, None]
        return mask

    # -- prompts --------------------------------------------------------------------------------

    def _prompt(
        self, kv: Tensor, index: int, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> Tensor:
        row = self._prompt_rows[index]
        mask, fresh = None, row.query_len == row.context_len
        if not fresh:
            keys, values = self._gather(kv, row.pages[None])
            k, v = (x[0, :, : row.context_len].transpose(0, 1) for x in (keys, values))
        if not fresh or (window is not None and window < row.context_len):
            mask = self._prompt_mask(index, window)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def _prompt_mask(self, index: int, window: int | None) -> Tensor:
        """[query_len, context_len], True where a token may look."""
        mask = self._masks.get((index, window))
        if mask is None:
            row = self._prompt_rows[index]
            at = torch.arange(row.context_len, device=self._device)
            own = at[row.context_len - row.query_len :, None]
            mask = at <= own
            if window is not None:
                mask &= at > own - window
            self._masks[index, window] = mask
        return mask
