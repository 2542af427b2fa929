"""Attention with kernels of our own alone, for what no library has: soft caps, and head widths such
as 96. It is slower than FlashAttention-3 in long prompts, and equal in decode rows.

All prompts read pages, fresh ones as well: a step's K and V are stored before.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

from torch import Tensor

from engine.attention.fa3 import DecodeKernel
from engine.attention.paged import PagedAttention, PagedStep
from engine.attention.parts import division, tiles_of
from engine.pool.kv_pool import KvPool
from engine.step.attention import AttentionSpec, Specs


class PromptKernel(Protocol):
    """`engine.cuda.kv.prompt_attention.prompt_attention`, which some machines cannot import."""

    def __call__(
        self,
        q: Tensor,
        pool: KvPool,
        layer: int,
        query_starts: Tensor,
        max_query: int,
        contexts: Tensor,
        page_table: Tensor,
        spec: AttentionSpec,
    ) -> Tensor:
        """See there."""
        ...


class TritonBackend(PagedAttention):
    """`PagedAttention` without a library."""

    name = "triton"

    def __init__(
        self, pool: KvPool, specs: Specs, prompts: PromptKernel, decode: DecodeKernel
    ) -> None:
        super().__init__(pool, specs, ModuleType("none"))
        self._prompt_kernel = prompts
        self._decode_kernel = decode

    def attend_ends(self, layer: int, q: Tensor, contexts: Tensor, page_table: Tensor) -> Tensor:
        """See `PagedAttention`."""
        tiles, kv_heads = tiles_of(self._pool.head_dim), self._pool.num_kv_heads
        divided = division(len(contexts), kv_heads, differ=self._step.differ, tiles=tiles)
        spec = self._specs[layer]
        return self._decode_kernel(q, self._pool, layer, contexts, page_table, spec, divided)

    def _fresh_prompts(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: PagedStep,
        window: tuple[int, int],
    ) -> Tensor:
        return self._continued_prompts(layer, q, step, window)

    def _continued_prompts(
        self, layer: int, q: Tensor, step: PagedStep, window: tuple[int, int]
    ) -> Tensor:
        first, starts = step.num_decodes, step.query_starts
        assert starts is not None
        return self._prompt_kernel(
            q,
            self._pool,
            layer,
            starts,
            step.max_query,
            step.context_lens[first:],
            step.page_table[first:],
            self._specs[layer],
        )
