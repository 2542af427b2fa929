"""FlashAttention-2 over the paged pool (Dao 2023), on GPUs from Ampere on without a better backend.

Its pages must be a multiple of 256 tokens long. Decode rows use `flash_attn_with_kvcache`. Prompts
use `flash_attn_varlen_func`, which also reads pages by a block table.

We have not run it on a GPU yet. The tests run it over a stand-in for the library, which has the
library's documented signatures and refusals.
"""

from __future__ import annotations

from types import ModuleType

import torch.nn.functional as F
from torch import Tensor

from engine.attention.paged import PagedAttention, PagedStep, views_of, window_of
from engine.pool.kv_pool import KvPool
from engine.step.attention import Specs

PAGE_MULTIPLE = 256
"""FlashAttention-2's own demand on the tokens of a page."""


class Fa2Backend(PagedAttention):
    """`PagedAttention` over `flash_attn`."""

    name = "fa2"

    def __init__(self, pool: KvPool, specs: Specs, kernels: ModuleType) -> None:
        super().__init__(pool, specs, kernels)
        self._views = views_of(pool)

    def attend_ends(self, layer: int, q: Tensor, contexts: Tensor, page_table: Tensor) -> Tensor:
        """See `PagedAttention`."""
        keys, values = self._views[layer]
        spec = self._specs[layer]
        out: Tensor = self._kernels.flash_attn_with_kvcache(
            q.view(len(contexts), -1, *q.shape[1:]),
            keys,
            values,
            cache_seqlens=contexts,
            block_table=page_table,
            causal=True,
            softmax_scale=spec.scale,
            window_size=window_of(spec),
        )
        return out.flatten(0, 1)

    def _continued_prompts(
        self, layer: int, q: Tensor, step: PagedStep, window: tuple[int, int]
    ) -> Tensor:
        keys, values = self._views[layer]
        contexts = step.context_lens[step.num_decodes :]
        table = step.page_table[step.num_decodes :]
        out: Tensor = self._kernels.flash_attn_varlen_func(
            q,
            keys,
            values,
            step.query_starts,
            F.pad(contexts.cumsum(0), (1, 0)).int(),
            step.max_query,
            table.shape[1] * self._pool.page_size,
            softmax_scale=self._specs[layer].scale,
            causal=True,
            window_size=window,
            block_table=table,
        )
        return out
