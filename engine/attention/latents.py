"""Attention over pages of latents, with kernels of our own.

Decode rows, and prompts that were computed in part before, are absorbed: they read pages as they
are. Prompts that begin at position 0 make K and V of heads of their own latents, and use the
library where there is one. Its heads have K and V of one width, so what is missing is zeros.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

import torch.nn.functional as F
from torch import Tensor

from engine.attention.fa3 import DecodeKernel, Fa3Library
from engine.attention.paged import PagedAttention, PagedStep
from engine.attention.parts import (
    LEAST_TOKENS_OF_FEW,
    MOST_PARTS,
    PROCESSORS,
    Division,
    Tiles,
    division,
    has_two,
)
from engine.attention.triton import PromptKernel
from engine.pool.kv_pool import KvPool
from engine.step.attention import Latents, Specs

HEAD_DIMS: Final = (64, 128, 192, 256)
"""Widths of heads for which the library of Hopper has kernels."""
DEEP, LARGE, BUSY = Tiles(32, 4, 5), Tiles(64, 8, 2), Tiles(64, 4, 2)
"""Rounds of 32 latents, five under way, take 180 KiB of a processor's shared memory: one program at
a time reads fastest. Large ones are faster where there are few items, and where a program has more
than 16 queries, which keep it busy (`bench.latents --sweep` on an H200, 2026-11-27: 64 rows of
1,152 tokens 49 -> 38 us, of 8,192 216 -> 192 and with two new tokens 354 -> 280; one of 8,192 42
-> 12; 64 rows of 1,152 with 128 heads 181 -> 103)."""
FEW_ITEMS, FEW_QUERIES = 16, 16
PROGRAMS: Final = 2 * PROCESSORS
"""Programs for few rows alike: two for each processor, one after the other; one, where it is busy
(same sweep)."""
MOST_PARTS_OF_FEW = 64
"""Most parts of a row: for one of 8,192 tokens 12 us, and with 32 parts 18."""
LEAST_TOKENS = 256
"""Least tokens of a part, where rows differ: its beginning costs something (same sweep)."""
MOST_QUERIES: Final = 64
"""Queries of a program. Sums of 512 numbers of each lie in registers: those of 64 take half of a
processor's."""


def blocks_of(heads: int, width: int) -> int:
    """Programs among which the heads of a row of so many new tokens are divided, each with as many
    of them."""
    return next(
        blocks
        for blocks in range(1, heads + 1)
        if heads % blocks == 0 and (heads // blocks * width <= MOST_QUERIES or blocks == heads)
    )


def divided(rows: int, heads: int, width: int, *, differ: bool) -> Division:
    """How the contexts of a batch are divided: see `engine.attention.parts.division`.

    Args:
        rows: of the batch.
        heads: of each row.
        width: new tokens of each row.
        differ: whether rows differ in length. Of small batches it is always true.
    """
    blocks = blocks_of(heads, width)
    items, queries = rows * blocks, heads // blocks * width
    is_busy = queries > FEW_QUERIES
    tiles = LARGE if items <= FEW_ITEMS else BUSY if is_busy else DEEP
    if items > PROCESSORS:
        many = division(rows, blocks, differ=differ)
        return many._replace(tiles=tiles)
    if differ and has_two(rows, blocks):
        return Division(MOST_PARTS, LEAST_TOKENS, tiles)
    most = (PROCESSORS if is_busy else PROGRAMS) // items
    return Division(min(most, MOST_PARTS_OF_FEW), LEAST_TOKENS_OF_FEW, tiles)


class LatentBackend(PagedAttention):
    """`PagedAttention` over latents."""

    name = "latents"

    def __init__(
        self,
        pool: KvPool,
        specs: Specs,
        prompts: PromptKernel,
        decode: DecodeKernel,
        library: Fa3Library | None = None,
    ) -> None:
        """`library`: FlashAttention-3; None: all prompts are absorbed."""
        super().__init__(pool, specs, library or ModuleType("none"))
        self._prompt_kernel = prompts
        self._decode_kernel = decode
        widest = max(_widest(pool, spec.latents) for spec in specs)
        self._width = next((dim for dim in HEAD_DIMS if dim >= widest), 0)
        self._has_library = library is not None and self._width > 0

    def attend_ends(self, layer: int, q: Tensor, contexts: Tensor, page_table: Tensor) -> Tensor:
        """See `PagedAttention`."""
        spec = self._specs[layer]
        assert spec.latents is not None, "the layer keeps latents"
        rows = len(contexts)
        parts = divided(rows, q.shape[1], len(q) // rows, differ=self._step.differ)
        q = spec.latents.absorbed(q)
        out = self._decode_kernel(q, self._pool, layer, contexts, page_table, spec, parts)
        return spec.latents.values(out)

    def _fresh_prompts(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: PagedStep,
        window: tuple[int, int],
    ) -> Tensor:
        latents = self._specs[layer].latents
        if not self._has_library or latents is None:
            return self._continued_prompts(layer, q, step, window)
        keys, values = latents.of_heads(k[:, 0])
        wide = [_padded(x, self._width) for x in (q, keys, values)]
        out = super()._fresh_prompts(layer, wide[0], wide[1], wide[2], step, window)
        return out[..., : latents.v_dim]

    def _continued_prompts(
        self, layer: int, q: Tensor, step: PagedStep, window: tuple[int, int]
    ) -> Tensor:
        spec, first, starts = self._specs[layer], step.num_decodes, step.query_starts
        assert starts is not None
        assert spec.latents is not None, "the layer keeps latents"
        out = self._prompt_kernel(
            spec.latents.absorbed(q),
            self._pool,
            layer,
            starts,
            step.max_query,
            step.context_lens[first:],
            step.page_table[first:],
            spec,
        )
        return spec.latents.values(out)


def _padded(x: Tensor, width: int) -> Tensor:
    """With zeros up to this width. PyTorch copies what has it already."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _widest(pool: KvPool, latents: Latents | None) -> int:
    """Numbers of a head's K or V."""
    assert latents is not None, "the layer keeps latents"
    turned = pool.head_dim - latents.weight.shape[2]
    return max(latents.k_dim + turned, latents.v_dim)
