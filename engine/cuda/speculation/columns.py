"""The tokens of a step's decode rows, made on the device: the host does not know their lengths."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import StepInputs, launch
from engine.speculation.tables import SlotTables

_TABLE_BLOCK = 128


@triton.jit(do_not_specialize=["decodes", "table_width"])
def _unpack_columns(
    header,
    slots,
    bounds,
    packed_table,
    lengths,
    next_tokens,
    drafts,
    token_ids,
    positions,
    stores,
    contexts,
    page_table,
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
        length = tl.load(lengths + slot)
        context = length + width
        column = tl.arange(0, columns)
        position = length + column
        kept = real & (position < bound) & (column < width)
        page = tl.load(source + position // page_size, mask=kept, other=0)
        drafted = (column > 0) & (column < width)
        token = tl.load(drafts + slot * most + column - 1, mask=drafted, other=0)
        token = tl.where(column == 0, tl.load(next_tokens + slot), token)
        at, here = row * width + column, column < width
        tl.store(token_ids + at, token, mask=here)
        tl.store(positions + at, position, mask=here)
        tl.store(stores + at, page * page_size + position % page_size, mask=here)
    tl.store(contexts + row, context)
    owned = tl.where(real, (bound + page_size - 1) // page_size, 0)
    pages = (context + page_size - 1) // page_size
    for start in range(0, pages, block):
        at = start + tl.arange(0, block)
        page = tl.load(source + at, mask=at < tl.minimum(owned, packed_width), other=0)
        tl.store(page_table + row * table_width + at, page, mask=at < pages)


def unpack_columns(
    header: Tensor,
    slots: Tensor,
    bounds: Tensor,
    packed_table: Tensor,
    tables: SlotTables,
    page_size: int,
    width: int,
    into: StepInputs,
    contexts: Tensor,
) -> None:
    """As `unpack_step`, for B decode rows of W tokens, then prompt rows. Positions of decode rows
    follow the device's lengths.

    Args:
        header: as there.
        slots: [B] int32; padding rows have the slot of nobody, whose length is 0.
        bounds: [R] int32. Of decode rows: the first position that is not kept; what belongs at or
            behind it goes to the scratch page. Of prompt rows: tokens in KV after the step.
        packed_table: the pages of the real rows, of decode rows up to their bounds.
        tables: by slot.
        page_size: tokens in a page.
        width: W.
        into: the inputs. The table has the scratch page behind a row's own pages.
        contexts: [R] int32: tokens that each row's last token sees, with itself.
    """
    launch(
        _unpack_columns,
        (len(bounds),),
        header,
        slots,
        bounds,
        packed_table,
        tables.length,
        tables.next,
        tables.drafts,
        into.token_ids,
        into.positions,
        into.stores,
        contexts,
        into.page_table,
        len(slots),
        into.page_table.shape[1],
        tables.most,
        width,
        triton.next_power_of_2(width),
        page_size,
        _TABLE_BLOCK,
    )
