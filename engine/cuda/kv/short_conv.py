"""A short causal convolution between two gates, over pages, in one pass.

A program takes a token and some channels. What the convolution reads of earlier tokens of the same
step is made once more from their gates, so no program waits for another one; the pages have that of
older tokens. All arithmetic is float32. A value is rounded at the same places as in
`engine.model.mixers.short_conv`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.attention.paged import PagedStep
from engine.cuda.early import early
from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.pool.kv_pool import KvPool
from engine.step.attention import Taps

_CHANNELS: Final = 1024
"""Channels of a program. Not tuned."""


@triton.jit
def _opened(gates, token, channels, at, inside):
    """B * x of a token, rounded."""
    before = tl.load(gates + token * 3 * channels + at, mask=inside, other=0.0)
    mixed = tl.load(gates + token * 3 * channels + 2 * channels + at, mask=inside, other=0.0)
    product = before.to(tl.float32) * mixed.to(tl.float32)
    return product.to(gates.dtype.element_ty)


@triton.jit(do_not_specialize=["decodes", "width", "prompts", "table_width"])
def _short_conv(
    gates, pool, out, taps, bias, stores, contexts, page_table, query_starts,
    page_stride, head_stride, layer_offset, decodes, width, prompts, table_width,
    channels: tl.constexpr, kernel: tl.constexpr, dim: tl.constexpr, page_size: tl.constexpr,
    has_bias: tl.constexpr, has_prompts: tl.constexpr, padded_prompts: tl.constexpr,
    pdl: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < channels
    # Which row has the token, which of the row's new tokens it is, and how many there are.
    row, within, count = token // width, token % width, width
    if has_prompts:  # noqa: SIM102 -- it is known when the kernel is compiled
        if token >= decodes * width:
            own = token - decodes * width
            number = tl.arange(0, padded_prompts)
            begins = tl.load(query_starts + number, mask=number < prompts, other=1 << 30)
            prompt = tl.maximum(tl.sum((begins <= own).to(tl.int32)) - 1, 0)
            first = tl.load(query_starts + prompt)
            row, within = (decodes + prompt).to(tl.int64), own - first
            count = tl.load(query_starts + prompt + 1) - first
    context = tl.load(contexts + row)
    position = context - count + within
    # A page has a half of each block of channels as K, and the other one as V.
    part = at % (2 * dim)
    place = (at // (2 * dim)).to(tl.int64) * head_stride + layer_offset
    place += part // dim * page_size * dim + part % dim
    value = _opened(gates, token, channels, at, inside)
    store = tl.load(stores + token).to(tl.int64)
    target = pool + store // page_size * page_stride + store % page_size * dim
    tl.store(target + place, value, mask=inside)
    total = value.to(tl.float32) * tl.load(
        taps + at * kernel + kernel - 1, mask=inside, other=0.0
    ).to(tl.float32)
    for back in tl.static_range(1, kernel):
        seen = position - back
        if (within >= back) & (within < count):
            earlier = _opened(gates, token - back, channels, at, inside)
        else:
            is_there = (seen >= 0) & (seen < context)  # Padding has none.
            page = tl.load(
                page_table + row * table_width + seen // page_size, mask=is_there, other=0
            ).to(tl.int64)
            source = pool + page * page_stride + seen % page_size * dim
            earlier = tl.load(source + place, mask=inside & is_there, other=0.0)
        tap = tl.load(taps + at * kernel + kernel - 1 - back, mask=inside, other=0.0)
        total += earlier.to(tl.float32) * tap.to(tl.float32)
    if has_bias:
        total += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    after = tl.load(gates + token * 3 * channels + channels + at, mask=inside, other=0.0)
    rounded = total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * channels + at, after.to(tl.float32) * rounded, mask=inside)


def short_conv(
    gates: Tensor, pool: KvPool, layer: int, step: PagedStep, stores: Tensor, taps: Taps
) -> Tensor:
    """Convolves B * x of each token with those of the tokens before it, and stores it.

    Args:
        gates: [T, 3 C]: B, C and x, contiguous.
        pool: the pool that keeps B * x.
        layer: layer of the pool.
        step: its rows.
        stores: [T] int32, page * page_size + offset of each token.
        taps: of the layer.

    Returns:
        [T, C], times the gate C.
    """
    pool, layer = pool.band_of(layer)
    tokens, channels = gates.shape[0], gates.shape[1] // 3
    out = gates.new_empty(tokens, channels)
    starts = step.query_starts
    prompts = 0 if starts is None else len(starts) - 1
    block = min(_CHANNELS, power_of_2(channels))
    launch(
        _short_conv,
        (tokens, pieces_of(channels, block)),
        gates,
        pool.elements,
        out,
        taps.weight,
        gates if taps.bias is None else taps.bias,
        stores,
        step.context_lens,
        step.page_table,
        stores if starts is None else starts,
        pool.page_stride,
        pool.head_stride,
        layer * pool.layer_stride,
        step.num_decodes,
        step.width,
        prompts,
        step.page_table.shape[1],
        channels,
        taps.weight.shape[1],
        pool.head_dim,
        pool.page_size,
        taps.bias is not None,
        starts is not None,
        power_of_2(max(prompts, 1)),
        early(),
        block,
        launch_pdl=early(),
    )
    return out
