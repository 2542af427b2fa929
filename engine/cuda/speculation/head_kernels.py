"""What a draft head needs around its layer, in kernels: which tokens follow, where a row's drafts
have their places, and the layer's input."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, pieces_of, power_of_2
from engine.cuda.steps.inputs import StepColumns
from engine.cuda.steps.packing import PackedStep
from engine.speculation.tables import SlotTables

_TABLE_BLOCK = 128
"""Entries of a row of the table that a program looks at in a turn. Not tuned."""
_TOKENS = 128
"""Prompt tokens of a program. Not tuned."""


class DraftRows(NamedTuple):
    """B rows that draft, at fixed addresses; all int32. D: places of a row, its newest one and
    those of all drafts but the last."""

    behind: Tensor
    """[T], the token behind each of the step's."""
    last: Tensor
    """[B], the newest token of each row that counts, among the step's."""
    positions: Tensor
    """[D, B]"""
    stores: Tensor
    """[D, B], places in the pool. The scratch page where a row has no page."""
    contexts: Tensor
    """[D, B], tokens in the row's table up to the place."""
    table: Tensor
    """[B, P], pages behind the last one that lacks the head's KV."""


@triton.jit(do_not_specialize=["table_width", "longest", "rows"])
def _begin_rows(
    header,
    slots,
    packed_table,
    ids,
    starts,
    lengths,
    newest,
    ready,
    drafted_from,
    behind,
    last,
    positions,
    stores,
    contexts,
    table,
    rows,
    table_width,
    longest,
    width: tl.constexpr,
    columns: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    real, packed_width = row < tl.load(header), tl.load(header + 2)
    slot = tl.load(slots + row).to(tl.int64)
    old, length = tl.load(starts + row * width), tl.load(lengths + slot)
    count = length - old
    source = packed_table + row * packed_width
    # The tokens behind those of the step.
    column = tl.arange(0, columns)
    here = column < width
    drafted = tl.load(ids + row * width + column + 1, mask=column < width - 1, other=0)
    token = tl.where(column == count - 1, tl.load(newest + slot), drafted)
    tl.store(behind + row * width + column, token, mask=here)
    tl.store(last + row, row * width + tl.maximum(count - 1, 0))
    skipped = tl.load(drafted_from + row)
    # A place for each of its newest token and its drafts but the last.
    depth = tl.arange(0, columns)
    position = length - 1 + depth
    index = tl.maximum(position, 0) // page_size
    within = real & (depth < width - 1) & (position >= 0) & (index < packed_width)
    page = tl.load(source + index, mask=within, other=0)
    has = within & (page > 0) & (position < longest)
    first = depth == 0
    ahead = (depth > 0) & (depth < width - 1)
    missing = tl.min(tl.where(ahead & (has == 0), depth, width - 1), axis=0)
    drafts = tl.where((count > 0) & (length <= longest), missing, 0)
    tl.store(ready + slot, tl.where(real, drafts, 0))
    own = tl.where(first, old + tl.maximum(count, 1), position + 1) - skipped * page_size
    keeps = (depth < width - 1) & (first | (has & (depth < missing)))
    at = depth * rows + row
    written = depth < width - 1
    tl.store(positions + at, tl.maximum(position, 0), mask=written)
    tl.store(
        stores + at, tl.where(has & keeps, page * page_size + position % page_size, 0), written
    )
    tl.store(contexts + at, tl.where(keeps, own, 1), mask=written)
    end = tl.minimum((length + width) // page_size + 1 - skipped, table_width)
    for start in tl.range(0, end, block):
        entry = start + tl.arange(0, block)
        there = real & (entry < end) & (entry + skipped < packed_width)
        known = tl.load(source + entry + skipped, mask=there, other=0)
        tl.store(table + row * table_width + entry, known, mask=entry < end)


def begin_rows(
    packed: PackedStep,
    inputs: StepColumns,
    tables: SlotTables,
    longest: int,
    page_size: int,
    into: DraftRows,
) -> None:
    """Queues what the decode rows of a step need to draft W - 1 tokens each. Tokens are drawn, and
    the tables are behind them: `ready` becomes the drafts that there will be.

    Args:
        packed: the step, B decode rows of W > 1 tokens.
        inputs: its tokens.
        tables: by slot.
        longest: positions that the head knows.
        page_size: tokens in a page.
        into: becomes what it says, for decode rows.
    """
    rows, width = packed.shape.decodes, packed.shape.width
    launch(
        _begin_rows,
        (rows,),
        packed.header,
        packed.slots,
        packed.page_table,
        inputs.token_ids,
        inputs.positions,
        tables.length,
        tables.next,
        tables.ready,
        packed.drafted_from,
        into.behind,
        into.last,
        into.positions,
        into.stores,
        into.contexts,
        into.table,
        rows,
        into.table.shape[1],
        longest,
        width,
        power_of_2(width),
        page_size,
        _TABLE_BLOCK,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["count"])
def _follow(known, newest, behind, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    here = at < count
    token = tl.load(known + at, mask=here, other=0)
    drawn = tl.load(newest - 1 - token, mask=here & (token < 0), other=0)
    tl.store(behind + at, tl.where(token < 0, drawn, token), mask=here)


def follow(known: Tensor, newest: Tensor, behind: Tensor) -> None:
    """Fills in the token behind each of L tokens that are drawn or known by now.

    Args:
        known: [L] int32: the token; or -1 - slot, where it is the newest one of a slot.
        newest: int32, by slot.
        behind: [L] int32, is filled in.
    """
    grid = (pieces_of(len(known), _TOKENS),)
    launch(_follow, grid, known, newest, behind, len(known), _TOKENS)


@triton.jit
def _enter(
    embedded,
    features,
    token_gain,
    feature_gain,
    out,
    eps,
    most: tl.constexpr,
    size: tl.constexpr,
    keeps_normed: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    dtype: tl.constexpr = out.dtype.element_ty
    value = tl.load(embedded + row * size + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    gain = tl.load(token_gain + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * 2 * size + at, value * scale * gain, mask=inside)
    value = tl.load(features + row * size + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(value == value, value, 0.0)
    value = tl.minimum(tl.maximum(value, -most), most)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    gain = tl.load(feature_gain + at, mask=inside, other=0.0).to(tl.float32)
    normed = (value * scale * gain).to(dtype)
    tl.store(out + row * 2 * size + size + at, normed, mask=inside)
    tl.store(features + row * size + at, normed if keeps_normed else value, mask=inside)


def enter(
    embedded: Tensor, features: Tensor, gains: tuple[Tensor, Tensor], eps: float, *, normed: bool
) -> Tensor:
    """[T, H] embeddings and features -> [T, 2 H], both normed by their gains. `features` stay what
    the layer adds to: as they are, or `normed`. What is no number becomes one, since K and V are
    kept."""
    size = features.shape[1]
    out = features.new_empty(len(features), 2 * size)
    most = torch.finfo(features.dtype).max
    block = power_of_2(size)
    launch(
        _enter, (len(features),), embedded, features, *gains, out, eps, most, size, normed, block
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["depth"])
def _keep(
    found, tokens, slots, drafts, ids, depth, count, most: tl.constexpr, mapped: tl.constexpr
):
    row = tl.program_id(0)
    token = tl.minimum(tl.maximum(tl.load(found + row), 0), count - 1)
    if mapped:
        token = tl.load(tokens + token).to(tl.int32)
    tl.store(ids + row, token)
    tl.store(drafts + tl.load(slots + row).to(tl.int64) * most + depth, token)


def keep(
    found: Tensor, tokens: Tensor | None, count: int, slots: Tensor, tables: SlotTables, depth: int
) -> Tensor:
    """Puts a draft of each row into the tables; returns them as tokens of the model, [B] int32.

    Args:
        found: [B] int32, as the head counts its tokens.
        tokens: [count] int64, tokens of the model by those; None: they are the same.
        count: tokens that the head may draft.
        slots: [B] int32.
        tables: by slot.
        depth: which of a row's drafts it is.
    """
    ids = torch.empty_like(found)
    given = found if tokens is None else tokens
    rest = (tables.drafts, ids, depth, count, tables.most, tokens is not None)
    launch(_keep, (len(found),), found, given, slots, *rest, num_warps=1)
    return ids
