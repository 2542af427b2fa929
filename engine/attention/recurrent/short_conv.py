"""Short convolutions in the place of attention: each token reads the last few ones.

A page has the inputs of the convolution, a half of each block of channels as K and the other as V.
The reference is for all devices, as `sdpa` is; on the fast path a kernel convolves
(`engine.cuda.kv.short_conv`), which gets the step here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.paged import PagedStep
from engine.pool.kv_pool import KvPool
from engine.step.attention import AttentionBatch, Specs, Taps


class _Before(NamedTuple):
    """The places of the K - 1 tokens before each of T, the oldest first."""

    pages: Tensor
    """[T, K - 1] int64."""
    offsets: Tensor
    """[T, K - 1] int64."""
    is_there: Tensor
    """[T, K - 1, 1, 1]; False before the first token of a sequence."""


class ShortConvBackend:
    """`AttentionBackend` of layers that convolve."""

    name = "short-conv"

    def __init__(self, pool: KvPool, specs: Specs) -> None:
        self._pool = pool
        self._specs = specs

    def begin(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        self._batch = batch
        lens, device = batch.query_lens, batch.page_table.device
        rows = np.repeat(np.arange(len(lens)), lens)
        starts = np.repeat(batch.context_lens - lens, lens)
        within = np.arange(len(rows)) - np.repeat(lens.cumsum() - lens, lens)
        longest = max(spec.window or 1 for spec in self._specs)
        at = (starts + within)[:, None] - np.arange(longest - 1, 0, -1)
        index, offsets = np.divmod(np.maximum(at, 0), self._pool.page_size)
        row, column = torch.from_numpy(rows).to(device), torch.from_numpy(index).to(device)
        self._before = _Before(
            batch.page_table[row[:, None], column],
            torch.from_numpy(offsets).to(device),
            torch.from_numpy(at >= 0).to(device)[:, :, None, None],
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend`. There are no queries, and `q` is not read. Returns
        [T, blocks, 2 D]."""
        batch, taps = self._batch, self._specs[layer].taps
        assert taps is not None, "a layer of this group convolves"
        self._pool.write(layer, batch.token_pages, batch.token_offsets, k, v)
        halves = zip(self._pool.layer(layer), (k, v), strict=True)
        return _convolved([self._read(*half, taps) for half in halves], taps)

    def attend_ends(self, layer: int, q: Tensor, contexts: Tensor, page_table: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        raise NotImplementedError("the kernel computes all tokens")

    def reserve(self, tokens: int, rows: int) -> None:
        """See `PagedAttention`."""
        return

    def prepare(self, step: PagedStep) -> None:
        """Sets the step for a kernel that convolves."""
        self.step = step

    def _read(self, stored: Tensor, own: Tensor, taps: Taps) -> Tensor:
        """[T, K, blocks, D]: a half of each token's inputs and of those before it."""
        before = self._before
        found = stored[before.pages, :, before.offsets]
        found = torch.where(before.is_there, found, torch.zeros_like(found))
        return torch.cat((found, own[:, None]), dim=1)


def _convolved(halves: list[Tensor], taps: Taps) -> Tensor:
    inputs = torch.stack(halves, dim=3)  # [T, K, blocks, 2, D]
    tokens, kernel, blocks, _, dim = inputs.shape
    weights = taps.weight.T.reshape(kernel, blocks, 2, dim).float()
    out = (inputs.float() * weights).sum(1)
    if taps.bias is not None:
        out = out + taps.bias.view(blocks, 2, dim).float()
    return out.to(inputs.dtype).view(tokens, blocks, 2 * dim)
