"""Fused Triton kernels: the work between two matrix products, in one pass over memory.

All arithmetic is float32. A value is rounded at the same places as in `engine.model.decoder`. The
kernels that read and write the KV pool are in `engine.cuda.kv` and `engine.cuda.decode_attention`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.steps import launching

Kernel = Any
"""A kernel launcher. Triton has no types."""

_ACTIVATION_BLOCK = 1024
_LOGITS_BLOCK = 4096
_TABLE_BLOCK = 128
"""Columns, logits and entries of a table that a program takes at once. Not tuned."""


# -- norms --------------------------------------------------------------------------------------


@triton.jit
def _rms_norm(x, weight, out, eps, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, value * scale * gain, mask=inside)


@triton.jit
def _add_rms_norm(
    residual, x, weight, out, eps, size: tl.constexpr, pdl: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if pdl:
        gdc_wait()
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(residual.dtype.element_ty)
    tl.store(residual + row * size + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    tl.store(out + row * size + at, value * scale * gain, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of [T, H]."""
    out = torch.empty_like(x)
    size = x.shape[1]
    launch(_rms_norm, (x.shape[0],), x, weight, out, eps, size, power_of_2(size))
    return out


def add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds `x` to `residual` in place; returns the norm of the sum. Both are [T, H]."""
    size = x.shape[1]
    block = power_of_2(size)
    arguments = (residual, x, weight, x, eps, size, early(), block)
    launch(_add_rms_norm, (x.shape[0],), *arguments, launch_pdl=early())
    return x


@triton.jit
def _norm_part(x, first, second, eps, stride, size, size2, block: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    weight = first
    start = 0
    if part == 1:
        weight = second
        start = size
        size = size2
    at = tl.arange(0, block)
    inside = at < size
    place = x + row * stride + start + at
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, value * scale * gain, mask=inside)


def norm_parts(x: Tensor, first: Tensor, second: Tensor, eps: float) -> None:
    """Root mean square norms, in place, of the first and of the next numbers of each row of [T, H].
    The gains say how many."""
    sizes = len(first), len(second)
    block = power_of_2(max(sizes))
    launch(_norm_part, (len(x), 2), x, first, second, eps, x.shape[1], *sizes, block)


# -- activation ---------------------------------------------------------------------------------


@triton.jit
def _silu_mul(gate_up, out, size, pdl: tl.constexpr, block: tl.constexpr):
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + at, activated * up, mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I], gate then up -> [T, I]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    grid = (rows, -(-size // _ACTIVATION_BLOCK))
    arguments = (gate_up, out, size, early(), _ACTIVATION_BLOCK)
    launch(_silu_mul, grid, *arguments, launch_pdl=early())
    return out


@triton.jit
def _gelu_mul(
    gates, ups, out, size, gate_stride, up_stride, by_tanh: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    gate = tl.load(gates + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    if by_tanh:  # (1 + tanh(x)) / 2 is the sigmoid of 2 x.
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    activated = (gate * share).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + at, activated * up, mask=inside)


def gelu_mul(gate: Tensor, up: Tensor, *, by_tanh: bool) -> Tensor:
    """As `silu_mul`, with GELU, or its approximation by tanh (Hendrycks and Gimpel 2016). `gate`
    and `up` are [T, I], with any stride between tokens."""
    rows, size = gate.shape
    out = gate.new_empty(rows, size)
    grid = (rows, -(-size // _ACTIVATION_BLOCK))
    arguments = (gate, up, out, size, gate.stride(0), up.stride(0), by_tanh, _ACTIVATION_BLOCK)
    launch(_gelu_mul, grid, *arguments)
    return out


@triton.jit
def _relu_squared(x, out, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.maximum(value, 0.0)
    tl.store(out + row * size + at, value * value, mask=inside)


def relu_squared(x: Tensor) -> Tensor:
    """[T, I] -> [T, I]."""
    out, size = torch.empty_like(x), x.shape[1]
    grid = (len(x), -(-size // _ACTIVATION_BLOCK))
    launch(_relu_squared, grid, x, out, size, _ACTIVATION_BLOCK)
    return out


# -- greedy sampling ----------------------------------------------------------------------------


@triton.jit
def _best_of_block(logits, best, best_ids, finite, vocab, num_blocks, block_size: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * block_size + tl.arange(0, block_size)
    inside = at < vocab
    value = tl.load(logits + row * vocab + at, mask=inside, other=0.0).to(tl.float32)
    usable = tl.abs(value) < float("inf")
    value = tl.where(usable & inside, value, float("-inf"))
    most, where = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * num_blocks + block, most)
    tl.store(best_ids + row * num_blocks + block, block * block_size + where)
    tl.store(finite + row * num_blocks + block, tl.min(usable.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["rows"])
def _best_of_row(
    best, best_ids, finite, slots, token_table, drawn, rows, num_blocks, keeps: tl.constexpr,
    block_count: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, block_count)
    inside = at < num_blocks
    value = tl.load(best + row * num_blocks + at, mask=inside, other=float("-inf"))
    block = tl.argmax(value, axis=0, tie_break_left=True)
    token = tl.load(best_ids + row * num_blocks + block)
    usable = tl.load(finite + row * num_blocks + at, mask=inside, other=1)
    tl.store(drawn + row, token)
    tl.store(drawn + rows + row, tl.min(usable, axis=0))
    if keeps:
        tl.store(token_table + tl.load(slots + row), token)


def greedy(logits: Tensor, slots: Tensor, token_table: Tensor) -> Tensor:
    """Puts the best token of each row, the lowest id among equals, into the token table.

    Args:
        logits: [S, V], contiguous.
        slots: [S] int32.
        token_table: int32, by slot.

    Returns:
        [2, S] int32: the tokens; 1 if the row held neither NaN nor infinity, else 0.
    """
    return _best(logits, slots, token_table, keeps=True)


def best_of_rows(logits: Tensor) -> Tensor:
    """The tokens of `greedy`, which go nowhere else."""
    nowhere = torch.empty(0, dtype=torch.int32, device=logits.device)
    return _best(logits, nowhere, nowhere, keeps=False)


def _best(logits: Tensor, slots: Tensor, token_table: Tensor, *, keeps: bool) -> Tensor:
    found = best_of_blocks(logits)
    rows, num_blocks = found.best.shape
    drawn = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    blocks = power_of_2(num_blocks)
    arguments = (*found, slots, token_table, drawn, rows, num_blocks, keeps, blocks)
    launch(_best_of_row, (rows,), *arguments)
    return drawn


class BlocksBest(NamedTuple):
    """The best of each block of each row of logits; all are [S, blocks]."""

    best: Tensor
    """float32"""
    ids: Tensor
    """int32"""
    finite: Tensor
    """int32: 1 if the block held neither NaN nor infinity, else 0."""


def best_of_blocks(logits: Tensor) -> BlocksBest:
    """Finds the best of each block of logits [S, V], contiguous."""
    rows, vocab = logits.shape
    num_blocks = -(-vocab // _LOGITS_BLOCK)
    best = torch.empty(rows, num_blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    found = BlocksBest(best, ids, torch.empty_like(ids))
    grid = (rows, num_blocks)
    launch(_best_of_block, grid, logits, *found, vocab, num_blocks, _LOGITS_BLOCK)
    return found


# -- inputs of a padded step ---------------------------------------------------------------------


class StepInputs(NamedTuple):
    """The inputs of the forward pass of T tokens in R rows, at fixed addresses."""

    token_ids: Tensor
    """[T] int32. All fields are int32."""
    positions: Tensor
    stores: Tensor
    page_table: Tensor
    """[R, P]. Entries beyond a row's context are left from an earlier step."""
    contexts: Tensor
    """[R], tokens that a row's last token sees in the group's table, with itself."""


@triton.jit(do_not_specialize=["decodes", "table_width"])
def _unpack_step(
    header,
    slots,
    contexts,
    packed_table,
    token_table,
    token_ids,
    positions,
    stores,
    page_table,
    decodes,
    table_width,
    page_size: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    real_decodes, real_prompts = tl.load(header), tl.load(header + 1)
    packed_width = tl.load(header + 2)
    decodes_here = row < decodes
    prompt = row - decodes
    real = tl.where(decodes_here, row < real_decodes, prompt < real_prompts)
    packed_row = tl.where(decodes_here, row, real_decodes + prompt)
    source = packed_table + packed_row * packed_width
    position = tl.load(contexts + row) - 1
    last = position // page_size
    if decodes_here:
        page = tl.load(source + last, mask=real, other=0)
        tl.store(token_ids + row, tl.load(token_table + tl.load(slots + row)))
        tl.store(positions + row, position)
        tl.store(stores + row, page * page_size + position % page_size)
    for start in range(0, last + 1, block):
        at = start + tl.arange(0, block)
        inside = at <= last
        pages = tl.load(source + at, mask=inside & real, other=0)
        tl.store(page_table + row * table_width + at, pages, mask=inside)


def unpack_step(
    header: Tensor,
    slots: Tensor,
    contexts: Tensor,
    packed_table: Tensor,
    token_table: Tensor,
    page_size: int,
    into: StepInputs,
) -> None:
    """Spreads one packed copy over the inputs of a step of B decode rows, then prompt rows.

    Args:
        header: [3] int32: number of real decode rows, number of real prompt rows, width of
            `packed_table`.
        slots: [B] int32; padding rows have an unused slot.
        contexts: [R] int32, tokens in KV after the step; 1 for padding rows, which read and
            write only the scratch page (page 0).
        packed_table: the pages of the real rows.
        token_table: int32, by slot: the input token of each decode row.
        page_size: tokens in a page.
        into: the inputs. The table is filled in for all rows, ids, positions and stores for decode
            rows.
    """
    launch(
        _unpack_step,
        (len(contexts),),
        header,
        slots,
        contexts,
        packed_table,
        token_table,
        into.token_ids,
        into.positions,
        into.stores,
        into.page_table,
        len(slots),
        into.page_table.shape[1],
        page_size,
        _TABLE_BLOCK,
    )


def power_of_2(least: int) -> int:
    """The smallest power of 2 that is not below `least`. Triton's own takes the host 4 us a call,
    and steps without a graph ask for a dozen a layer. For the same reason the number of rows is
    `x.shape[0]` here: `len(x)` takes four times as long."""
    return 1 << (least - 1).bit_length()


def pieces_of(size: int, each: int) -> int:
    """How many pieces of at most `each` make up `size`. As `power_of_2`, not Triton's own."""
    return -(-size // each)


def launch(kernel: Kernel, grid: tuple[int, ...], *arguments: object, **options: int) -> None:
    """Launches a Triton kernel on the current stream; `options` are the compiler's."""
    launching.launch(kernel, grid, arguments, options)
