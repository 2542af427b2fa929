"""FlashAttention-3 over the paged pool (Shah et al. 2024), on Hopper GPUs.

The kernels read the pool's strided views in place: one pair of views a layer, made once. Decode
rows and prompt rows are two calls: each has kernels of its own. Prompts that begin at position 0
attend over the new K and V where they are, without going through pages.

Two ways in, one set of calls:
- a plain `AttentionBackend`: `begin` takes a batch from the host, a call stores K and V itself;
- the CUDA executor stores K and V in a fused kernel, describes a step with tensors that are on
  the device already (`prepare`) and calls `attend`. Nothing there waits for the device, so it
  can be captured in a graph.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.base import AttentionBatch
from engine.kv_pool import KvPool

FEW_TILES = 264
"""Decode calls of fewer (row, KV head) pairs than two for each of a Hopper's 132 processors split
rows along the context; more fill the chip unsplit, and then a row's result depends on no other."""
ALL = (-1, -1)


class PagedStep(NamedTuple):
    """R rows of a step as the kernels read them: decode rows, then prompt rows."""

    num_decodes: int
    context_lens: Tensor
    """[R] int32, tokens in KV after the step."""
    page_table: Tensor
    """[R, P] int32."""
    query_starts: Tensor | None
    """[prompt rows + 1] int32, where each prompt row's tokens start among those of prompt rows;
    None: there is no prompt row."""
    max_query: int
    """Most new tokens of a prompt row."""
    all_fresh: bool
    """Every prompt row begins at position 0."""


class Fa3Backend:
    """`AttentionBackend` over `flash_attn_interface`."""

    name = "fa3"

    def __init__(self, pool: KvPool, windows: tuple[int | None, ...], kernels: ModuleType) -> None:
        self._pool = pool
        self._kernels = kernels
        """The module `flash_attn_interface`, or one with its signatures."""
        self._windows = tuple(ALL if window is None else (window - 1, 0) for window in windows)
        """Per layer: positions seen before a token's own, and after it."""
        self._views = [
            (keys.transpose(1, 2), values.transpose(1, 2))
            for keys, values in map(pool.layer, range(len(windows)))
        ]
        self._metadata: dict[tuple[int, int], Tensor] = {}
        """How the step's decode rows are spread over the chip, by window."""

    def begin(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        self._store_at = (batch.token_pages, batch.token_offsets)
        device, first = batch.page_table.device, batch.num_decodes
        queries = torch.from_numpy(batch.query_lens[first:]).to(torch.int32)
        starts = None
        if len(queries):
            starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int().to(device)
        fresh = bool((batch.query_lens[first:] == batch.context_lens[first:]).all())
        self.prepare(
            PagedStep(
                num_decodes=first,
                context_lens=torch.from_numpy(batch.context_lens).int().to(device),
                page_table=batch.page_table.int(),
                query_starts=starts,
                max_query=int(batch.query_lens[first:].max(initial=0)),
                all_fresh=fresh,
            )
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        pages, offsets = self._store_at
        stored = self._pool.layer_kv(layer)
        stored[pages, :, :, offsets] = torch.stack((k, v), dim=2)
        return self.attend(layer, q, k, v)

    def prepare(self, step: PagedStep) -> None:
        """The step that `attend` works on from now on."""
        self._step = step
        self._metadata.clear()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer, whose K and V of this step are in the pool. Shapes as `AttentionBackend`."""
        step, count = self._step, self._step.num_decodes
        if step.query_starts is None:
            return self._decode(layer, q)
        if count == 0:
            return self._prompts(layer, q, k, v)
        prompts = self._prompts(layer, q[count:], k[count:], v[count:])
        return torch.cat((self._decode(layer, q[:count]), prompts))

    def _decode(self, layer: int, q: Tensor) -> Tensor:
        step, window, count = self._step, self._windows[layer], self._step.num_decodes
        keys, values = self._views[layer]
        if window not in self._metadata:
            self._metadata[window] = self._spread(q, window)
        out: Tensor = self._kernels.flash_attn_with_kvcache(
            q[:, None],
            keys,
            values,
            cache_seqlens=step.context_lens[:count],
            page_table=step.page_table[:count],
            causal=True,
            window_size=window,
            scheduler_metadata=self._metadata[window],
            num_splits=self._num_splits(count),
        )
        return out[:, 0]

    def _spread(self, q: Tensor, window: tuple[int, int]) -> Tensor:
        """Asks the library, once a step and window, how it spreads the rows over the chip."""
        count, page_table = self._step.num_decodes, self._step.page_table
        spread: Tensor = self._kernels.get_scheduler_metadata(
            count,
            1,
            page_table.shape[1] * self._pool.page_size,
            q.shape[1],
            self._pool.tensor.shape[1],
            q.shape[2],
            self._step.context_lens[:count],
            qkv_dtype=q.dtype,
            page_size=self._pool.page_size,
            causal=True,
            window_size=window,
            num_splits=self._num_splits(count),
        )
        return spread

    def _num_splits(self, rows: int) -> int:
        """0: as many as the library thinks best."""
        return 0 if rows * self._pool.tensor.shape[1] < FEW_TILES else 1

    def _prompts(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step, window, first = self._step, self._windows[layer], self._step.num_decodes
        out: Tensor
        if step.all_fresh:
            out = self._kernels.flash_attn_varlen_func(
                q,
                k,
                v,
                step.query_starts,
                step.query_starts,
                step.max_query,
                step.max_query,
                causal=True,
                window_size=window,
            )
            return out
        keys, values = self._views[layer]
        out = self._kernels.flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=step.context_lens[first:],
            page_table=step.page_table[first:],
            cu_seqlens_q=step.query_starts,
            max_seqlen_q=step.max_query,
            causal=True,
            window_size=window,
        )
        return out
