"""The tokens of a step's decode rows, made on the device: the host does not know their lengths."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import StepInputs, launch, power_of_2
from engine.speculation.tables import SlotTables

_TABLE_BLOCK = 128
"""Entries of a row of the table that a program copies in a turn. Not tuned."""


@triton.jit(do_not_specialize=["decodes", "table_width"])
def _unpack_columns(
    header,
    slots,
    bounds,
    least,
    first_bounds,
    packed_table,
    lengths,
    next_tokens,
    drafts,
    token_ids,
    positions,
    stores,
    contexts,
    page_table,
    kept_bounds,
    decodes,
    table_width,
    most: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
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
    bound = tl.load(bounds + row)
    context = bound
    if decodes_here:
        slot = tl.load(slots + row).to(tl.int64)
        first_bound, length = tl.load(first_bounds + row), tl.load(lengths + slot)
        real = real & (length >= tl.load(least + row))
        tl.store(kept_bounds + row, tl.where(real, first_bound, 0))
        begin = length - (first_bound - bound)
        context = begin + width
        column = tl.arange(0, columns)
        position, here = begin + column, column < width
        kept = real & here & (position < bound) & (position >= 0)
        page = tl.load(source + position // page_size, mask=kept, other=0)
        drafted = (column > 0) & here
        token = tl.load(drafts + slot * most + column - 1, mask=drafted, other=0)
        token = tl.where(column == 0, tl.load(next_tokens + slot), token)
        at = row * width + column
        tl.store(token_ids + at, token, mask=here)
        tl.store(positions + at, length + column, mask=here)
        tl.store(stores + at, page * page_size + (length + column) % page_size, mask=here)
    tl.store(contexts + row, context)
    owned = tl.where(real, (bound + page_size - 1) // page_size, 0)
    pages = tl.minimum((context + page_size - 1) // page_size, table_width)
    for start in range(0, pages, block):
        at = start + tl.arange(0, block)
        page = tl.load(source + at, mask=at < tl.minimum(owned, packed_width), other=0)
        tl.store(page_table + row * table_width + at, page, mask=at < pages)


class Columns(NamedTuple):
    """What the host knows of a step's B decode rows and R rows in all, in one group of layers."""

    header: Tensor
    """[3] int32, as in `unpack_step`. All fields are int32."""
    slots: Tensor
    """[B]. Padding rows have the slot of nobody, whose length is 0."""
    bounds: Tensor
    """[R]. Of decode rows: the first position that is not kept, in the group's table. What belongs
    there or behind goes to the scratch page. Of prompt rows: tokens in KV after the step."""
    least: Tensor
    """[B]. Least lengths. A row that is shorter keeps nothing: the step that was to begin its
    sequence has failed, and the length is another's."""
    first_bounds: Tensor
    """[B], `bounds` in group 0, whose table begins with the sequence."""
    page_table: Tensor
    """The pages of the real rows, of decode rows up to their bounds."""


def unpack_columns(
    known: Columns, tables: SlotTables, page_size: int, width: int, into: StepInputs, kept: Tensor
) -> None:
    """As `unpack_step`, for B decode rows of W tokens, then prompt rows. Positions of decode rows
    follow the device's lengths.

    Args:
        known: of the step.
        tables: by slot.
        page_size: tokens in a page.
        width: W.
        into: the inputs. The table has the scratch page behind a row's own pages.
        kept: [B] int32, becomes the bounds of real rows in group 0, and 0 of others: of these no
            token counts.
    """
    launch(
        _unpack_columns,
        (len(known.bounds),),
        known.header,
        known.slots,
        known.bounds,
        known.least,
        known.first_bounds,
        known.page_table,
        tables.length,
        tables.next,
        tables.drafts,
        into.token_ids,
        into.positions,
        into.stores,
        into.contexts,
        into.page_table,
        kept,
        len(known.slots),
        into.page_table.shape[1],
        tables.most,
        width,
        power_of_2(width),
        page_size,
        _TABLE_BLOCK,
    )
