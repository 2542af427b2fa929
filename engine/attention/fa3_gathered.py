"""FlashAttention-3 over a pool that the library cannot read in place, such as one in FP8.

Contexts of prompts that were computed in part are gathered into a scratch first, in 16 bits. Decode
rows read the pool in place, by a kernel of its own.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.attention.fa3 import DecodeKernel, Fa3Backend, Fa3Library, splits_of
from engine.attention.paged import PagedStep
from engine.attention.parts import FP8
from engine.pool.kv_pool import KvPool
from engine.step.attention import AttentionBatch, Specs


class Gather(Protocol):
    """`engine.cuda.kv.fp8_gather.Gatherer`, which some machines cannot import."""

    def reserve(self, tokens: int, rows: int) -> None:
        """See there."""
        ...

    def begin(self, contexts: Tensor, page_table: Tensor) -> None:
        """See there."""
        ...

    def __call__(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """See there."""
        ...


class Fa3GatheredBackend(Fa3Backend):
    """`Fa3Backend` whose continued prompts attend over a scratch."""

    tiles = FP8

    def __init__(
        self,
        pool: KvPool,
        specs: Specs,
        kernels: Fa3Library,
        decode: DecodeKernel,
        gather: Gather,
    ) -> None:
        super().__init__(pool, specs, kernels, decode)
        self._gather = gather

    def reserve(self, tokens: int, rows: int) -> None:
        """See `PagedAttention`."""
        self._gather.reserve(tokens, rows)

    def begin(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`. The scratch grows with the batches."""
        prompts = batch.context_lens[batch.num_decodes :]
        self.reserve(int(prompts.sum()), len(prompts))
        super().begin(batch)

    def prepare(self, step: PagedStep) -> None:
        """See `PagedAttention`."""
        super().prepare(step)
        if step.query_starts is not None and not step.all_fresh:
            first = step.num_decodes
            self._gather.begin(step.context_lens[first:], step.page_table[first:])

    def _continued_prompts(
        self, layer: int, q: Tensor, step: PagedStep, window: tuple[int, int]
    ) -> Tensor:
        keys, values, starts = self._gather(layer)
        out: Tensor = self._kernels.flash_attn_varlen_func(
            q,
            keys,
            values,
            step.query_starts,
            starts,
            step.max_query,
            step.page_table.shape[1] * self._pool.page_size,
            softmax_scale=self._specs[layer].scale,
            causal=True,
            window_size=window,
            num_splits=splits_of(step),
            **self.more_options(layer),
        )
        return out
