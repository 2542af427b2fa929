"""Gathers the contexts of prompts from a pool in FP8, for libraries that read 16 bits.

A step's prompts lie in a scratch one behind the other. It has room for one layer, and every layer
uses it in turn. All sizes are on the device, so a graph can capture this:

1. Once a step, `_list_pages` lists the pages of all contexts, and the places of their first tokens
   in the scratch.
2. Once a layer, a fixed number of programs works through the list.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, power_of_2
from engine.cuda.kv.fp8_store import power_of_two
from engine.pool.kv_pool import KvPool

_PROGRAMS_OF_A_HEAD = 256
_TILE = 64
"""Tokens that a program converts at once."""
_LIST_BLOCK, _LISTS_OF_A_ROW = 128, 16
"""Pages that a program of the list takes at once, and programs for each row. Not tuned."""


@triton.jit(do_not_specialize=["rows", "table_width"])
def _list_pages(
    contexts,
    page_table,
    starts,
    count,
    pages,
    targets,
    ends,
    rows,
    table_width,
    page_size: tl.constexpr,
    padded_rows: tl.constexpr,
    block: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    others = tl.arange(0, padded_rows)
    tokens = tl.load(contexts + others, mask=others < rows, other=0)
    before = others < row
    first = tl.sum(tl.where(before, tokens, 0), axis=0)
    first_page = tl.sum(tl.where(before, tl.cdiv(tokens, page_size), 0), axis=0)
    context = tl.load(contexts + row)
    here = tl.cdiv(context, page_size)
    if part == 0:
        tl.store(starts + row, first)
        if row == rows - 1:
            tl.store(starts + rows, first + context)
            tl.store(count, first_page + here)
    for start in range(part * block, here, tl.num_programs(1) * block):
        index = start + tl.arange(0, block)
        inside = index < here
        page = tl.load(page_table + row.to(tl.int64) * table_width + index, mask=inside)
        tl.store(pages + first_page + index, page, mask=inside)
        tl.store(targets + first_page + index, first + index * page_size, mask=inside)
        tl.store(ends + first_page + index, first + context, mask=inside)


@triton.jit
def _gather_layer(
    values,
    exponents,
    count,
    pages,
    targets,
    ends,
    out_k,
    out_v,
    page_stride,
    head_stride,
    layer_offset,
    exponents_offset,
    dim: tl.constexpr,
    page_size: tl.constexpr,
    tile: tl.constexpr,
):
    head, heads = tl.program_id(1), tl.num_programs(1)
    values += head.to(tl.int64) * head_stride + layer_offset
    exponents += head.to(tl.int64) * head_stride + exponents_offset
    tokens = tl.load(count) * page_size
    at = tl.arange(0, dim)
    dtype: tl.constexpr = out_k.dtype.element_ty
    for start in range(tl.program_id(0) * tile, tokens, tl.num_programs(0) * tile):
        position = start + tl.arange(0, tile)
        listed, slot = position // page_size, position % page_size
        begun = listed * page_size < tokens
        place = tl.load(pages + listed, mask=begun, other=0).to(tl.int64) * page_stride
        target = tl.load(targets + listed, mask=begun, other=0) + slot
        inside = target < tl.load(ends + listed, mask=begun, other=0)
        k = tl.load(
            values + (place + slot * dim)[:, None] + at[None, :], mask=begun[:, None], other=0.0
        )
        turned = values + page_size * dim + (place + slot)[None, :] + at[:, None] * page_size
        v = tl.load(turned, mask=begun[None, :], other=0.0)
        scale = power_of_two(tl.load(exponents + place + slot, mask=inside, other=0).to(tl.int32))
        k = (k.to(tl.float32) * scale[:, None]).to(dtype)
        scale = tl.load(exponents + page_size + place + slot, mask=inside, other=0)
        v = (v.to(tl.float32) * power_of_two(scale.to(tl.int32))[None, :]).to(dtype)
        to = (target.to(tl.int64) * heads + head)[:, None] * dim + at[None, :]
        tl.store(out_k + to, k, mask=inside[:, None])
        tl.store(out_v + to, v.T, mask=inside[:, None])


class Gathered(NamedTuple):
    """K and V of a step's prompts in one layer."""

    k: Tensor
    """[tokens, Hkv, D]"""
    v: Tensor
    starts: Tensor
    """[rows + 1] int32, the start of each row's context among the tokens."""


class Gatherer:
    """The scratch, and the kernels that fill it."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._tokens = self._rows = 0

    def reserve(self, tokens: int, rows: int) -> None:
        """See `PagedAttention.reserve`. It never shrinks."""
        if tokens <= self._tokens and rows <= self._rows:
            return
        pool = self._pool
        self._tokens, self._rows = max(tokens, self._tokens), max(rows, self._rows)
        # Libraries read behind the last row, where a NaN would do harm.
        self._scratch = torch.zeros(
            (2, self._tokens, pool.num_kv_heads, pool.head_dim),
            dtype=pool.dtype,
            device=pool.device,
        )
        most_pages = self._tokens // pool.page_size + self._rows
        self._list = torch.zeros((3, most_pages), dtype=torch.int32, device=pool.device)
        self._starts = torch.zeros(self._rows + 1, dtype=torch.int32, device=pool.device)
        self._count = torch.zeros(1, dtype=torch.int32, device=pool.device)

    def begin(self, contexts: Tensor, page_table: Tensor) -> None:
        """Lists the pages of a step's prompts.

        Args:
            contexts: [rows] int32, tokens of each row.
            page_table: [rows, P] int32, contiguous.
        """
        rows = len(contexts)
        self._now = self._starts[: rows + 1]
        launch(
            _list_pages,
            (rows, _LISTS_OF_A_ROW),
            contexts,
            page_table,
            self._now,
            self._count,
            *self._list,
            rows,
            page_table.shape[1],
            self._pool.page_size,
            power_of_2(self._rows),
            _LIST_BLOCK,
        )

    def __call__(self, layer: int) -> Gathered:
        """Fills the scratch with a layer."""
        pool, layer = self._pool.band_of(layer)
        launch(
            _gather_layer,
            (_PROGRAMS_OF_A_HEAD, pool.num_kv_heads),
            pool.elements,
            pool.data.view(torch.int8),
            self._count,
            *self._list,
            *self._scratch,
            pool.page_stride,
            pool.head_stride,
            layer * pool.layer_stride,
            pool.head_values + layer * 2 * pool.page_size,
            pool.head_dim,
            pool.page_size,
            _TILE,
        )
        return Gathered(self._scratch[0], self._scratch[1], self._now)
