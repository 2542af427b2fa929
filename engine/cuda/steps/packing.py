"""A padded step's integers in the packed copy.

The step's shape alone decides the addresses of the sections, so a graph of the shape finds them in
every step. The page table of group 0 comes last, and its width is in the header. The other groups'
tables are as wide as any step of the shape needs, because what such a group keeps is bounded. That
of a group of states has its rows where the shape has them, and is read as it is.

Padding is harmless. A padding decode row has an unused token at position 0, and reads and writes
only the scratch page. Padding tokens of prompts write there, too. They are a row of their own, the
last one, which sees one token of that page. So every value of a step is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.cuda.steps.shapes import Shape
from engine.cuda.steps.staging import Int32s, StepStaging
from engine.groups.spec import Kind, State, Window
from engine.step.hooks import Narrowed
from engine.step.plan import STATE_COLUMNS, GroupTable, StepPlan
from engine.types import SCRATCH_PAGE


class Width(NamedTuple):
    """How wide the table of a group beyond group 0 is."""

    columns: int
    is_state: bool = False


def width_of(kind: Kind, page_size: int, most: int, prompt_tokens: int, ahead: int) -> Width:
    """How wide the table of a group of this kind is, in steps with so many tokens of prompts.

    Args:
        kind: the group's.
        page_size: tokens in a page.
        most: pages of the longest sequence.
        prompt_tokens: of all prompts.
        ahead: pages for drafts.
    """
    if isinstance(kind, State):
        return Width(STATE_COLUMNS, is_state=True)
    assert isinstance(kind, Window), "group 0 alone keeps all tokens"
    pages = kind.most_pages(page_size) + -(-prompt_tokens // page_size)
    return Width(min(most, pages) + ahead)


class PackedGroup(NamedTuple):
    """The sections of a group beyond group 0."""

    header: Tensor
    """As `PackedStep.header`."""
    contexts: Tensor
    """[R], tokens of each row in the group's table."""
    stores: Tensor | None
    """[C], the place of each prompt token. None if there is no prompt row."""
    page_table: Tensor
    is_state: bool = False
    """The table is one of states (`engine.step.plan.GroupTable`), with a row for each of the
    shape's."""


class PackedPrompts(NamedTuple):
    """The sections of a step with prompt rows."""

    tokens: Tensor
    """[3, C]: ids, positions and stores."""
    starts: Tensor
    """[R - B + 1], the start of each prompt row among the C tokens."""
    ends: Tensor
    """All tokens of decode rows, then the last token of each prompt row, among all tokens."""
    behind: Tensor | None = None
    """[C], the token behind each; -1 - slot: the next one of a slot. None: nobody asks."""


class PackedStep(NamedTuple):
    """The sections on the device, for B decode rows, R rows and C prompt tokens."""

    shape: Shape
    header: Tensor
    """[3]: number of real decode rows, number of real prompt rows, the table's width. All fields
    are int32."""
    slots: Tensor
    """[B]"""
    contexts: Tensor
    """[R]"""
    least: Tensor
    """[B] the least length that each decode row may have; read where lengths are the device's."""
    prompts: PackedPrompts | None
    """None if there is no prompt row."""
    counts: Tensor | None
    """[B] pages that a KV head of each row reads, 0 for all; None if no row is narrowed."""
    others: tuple[PackedGroup, ...]
    page_table: Tensor
    """Pages of the real rows."""
    sampled: Tensor
    """Rows of the logits that are sampled: W of each decode row, then one for each draw of
    prompts."""
    sample_slots: Tensor
    """[S]"""
    drafted_from: Tensor | None = None
    """[B], the page of each row from which on a draft head reads; None: there is no head."""

    @property
    def page_tables(self) -> list[Tensor]:
        """By group."""
        return [self.page_table, *(other.page_table for other in self.others)]


def pack(
    plan: StepPlan | None,
    shape: Shape,
    staging: StepStaging,
    nobody: int,
    page_size: int,
    narrowed: Narrowed | None = None,
    widths: Sequence[Width] = (),
    *,
    has_head: bool = False,
) -> PackedStep:
    """Adds a step's sections to the staging buffer. `plan` None: a step of padding only.

    Args:
        plan: a plan that fits `shape`.
        shape: the shape to which it is padded.
        staging: the staging buffer, after `begin`.
        nobody: the slot of padding rows.
        page_size: tokens in a page.
        narrowed: the rows that a hook has narrowed, if `shape` is for such.
        widths: of the table of each group beyond group 0.
        has_head: whether a draft head runs behind the step.
    """
    real = 0 if plan is None else plan.num_decodes
    prompt_rows = 0 if plan is None else len(plan.row_slots) - real
    table = np.full((1, 1), SCRATCH_PAGE, np.int32) if plan is None else plan.page_table
    slots = np.full(shape.decodes, nobody, np.int32)
    contexts = np.ones(shape.rows, np.int32)
    least = np.zeros(shape.decodes, np.int32)
    if plan is not None:
        slots[:real] = plan.row_slots[:real]
        least[:real] = plan.positions[: plan.decode_tokens : shape.width]
        contexts[:real] = plan.context_lens[:real]
        contexts[shape.decodes :][:prompt_rows] = plan.context_lens[real:]
    header = np.array([real, prompt_rows, table.shape[1]], np.int32)
    add, sampled = staging.add, _sampled(plan, shape)
    fixed = add(header), add(slots), add(contexts), add(least)
    prompts = None
    if shape.prompt_rows:
        prompts = _pack_prompts(plan, shape, staging, page_size)
        if has_head:
            prompts = prompts._replace(behind=add(_behind(plan, shape)))
    drafted_from = None
    if has_head:
        froms = np.zeros(shape.decodes, np.int32)
        froms[:real] = 0 if plan is None else plan.drafted_from[:real]
        drafted_from = add(froms)
    counts = add(counts_of(narrowed, shape.decodes)) if shape.narrowed else None
    others = tuple(
        _pack_group(plan, index, shape, staging, page_size, width)
        for index, width in enumerate(widths)
    )
    packed = PackedStep(shape, *fixed, prompts, counts, others, add(table), *map(add, sampled))
    return packed._replace(drafted_from=drafted_from)


def _pack_group(
    plan: StepPlan | None,
    index: int,
    shape: Shape,
    staging: StepStaging,
    page_size: int,
    width: Width,
) -> PackedGroup:
    """Adds the sections of a group beyond group 0. Its table has a row for each row of the shape,
    so that its place does not depend on the step."""
    contexts = np.ones(shape.rows, np.int32)
    header = np.array([0, 0, width.columns], np.int32)
    table, packed = staging.room((shape.rows, width.columns))
    table[:] = SCRATCH_PAGE
    stores = np.full(shape.prompt_tokens, SCRATCH_PAGE * page_size, np.int32)
    if plan is not None:
        other, real, rows = plan.others[index], plan.num_decodes, len(plan.row_slots)
        own = plan.context_lens - other.skipped * np.int32(page_size)
        header[:2] = real, rows - real
        contexts[:real] = own[:real]
        contexts[shape.decodes :][: rows - real] = own[real:]
        if width.is_state:
            table[:real, : other.pages.shape[1]] = other.pages[:real]
            table[shape.decodes :][: rows - real, : other.pages.shape[1]] = other.pages[real:]
        else:
            table[:rows, : other.pages.shape[1]] = other.pages
            first = plan.decode_tokens
            stores[: plan.num_tokens - first] = group_stores_of(plan, other, page_size)[first:]
    added = staging.add(header), staging.add(contexts)
    prompts = staging.add(stores) if shape.prompt_rows else None
    return PackedGroup(*added, prompts, packed, width.is_state)


def _pack_prompts(
    plan: StepPlan | None, shape: Shape, staging: StepStaging, page_size: int
) -> PackedPrompts:
    """Adds the sections of a step with prompt rows. Ids go into the staging buffer at once."""
    columns, tokens = staging.room((3, shape.prompt_tokens))
    columns[:2], columns[2] = 0, SCRATCH_PAGE * page_size
    lens = np.zeros(shape.prompt_rows, np.int32)
    if plan is not None:
        first, rows = plan.decode_tokens, plan.num_decodes
        lens[: len(plan.row_slots) - rows] = plan.query_lens[rows:]
        for column, values in zip(
            columns, (plan.token_ids, plan.positions, stores_of(plan, page_size)), strict=True
        ):
            column[: plan.num_tokens - first] = values[first:]
    lens[-1] += shape.prompt_tokens - lens.sum()
    starts = np.concatenate([[0], lens.cumsum()]).astype(np.int32)
    # A row without tokens ends at the end of the one before it. Its result is not used.
    first = shape.decode_tokens
    last = np.maximum(first + starts[1:] - 1, first)
    ends = np.concatenate([np.arange(first), last]).astype(np.int32)
    return PackedPrompts(tokens, staging.add(starts), staging.add(ends))


def _behind(plan: StepPlan | None, shape: Shape) -> Int32s:
    """[C], see `PackedPrompts`."""
    found = np.zeros(shape.prompt_tokens, np.int32)
    if plan is None:
        return found
    first, rows = plan.decode_tokens, plan.num_decodes
    own = plan.token_ids[first:]
    found[: len(own) - 1] = own[1:]
    found[np.cumsum(plan.query_lens[rows:]) - 1] = np.maximum(plan.successors, 0)
    drawn = plan.sample_tokens >= first
    # Of several draws of a row, the first one.
    found[plan.sample_tokens[drawn][::-1] - first] = -1 - plan.sample_slots[drawn][::-1]
    return found


def _sampled(plan: StepPlan | None, shape: Shape) -> tuple[Int32s, Int32s]:
    """Rows of the padded step's logits that are sampled, and the slots of the draws."""
    if plan is None:
        nothing = np.zeros(0, np.int32)
        return nothing, nothing
    rows, width = rows_of(plan)[plan.sample_tokens], shape.width
    decoding = rows[rows < plan.num_decodes]
    columns = decoding[:, None] * np.int32(width) + np.arange(width, dtype=np.int32)
    prompts = rows[len(decoding) :] + np.int32(shape.decode_tokens - plan.num_decodes)
    return np.concatenate([columns.reshape(-1), prompts]), plan.sample_slots


def stores_of(plan: StepPlan, page_size: int) -> Int32s:
    """[T], the place of each new token's K and V: page * page_size + offset."""
    index, offset = np.divmod(plan.positions, page_size)
    stores: Int32s = plan.page_table[rows_of(plan), index] * np.int32(page_size) + offset
    return stores


def group_stores_of(plan: StepPlan, other: GroupTable, page_size: int) -> Int32s:
    """[T], the same in a group beyond group 0."""
    index, offset = np.divmod(plan.positions, page_size)
    rows = rows_of(plan)
    pages = other.pages[rows, index - other.skipped[rows]]
    stores: Int32s = pages * np.int32(page_size) + offset
    return stores


def counts_of(narrowed: Narrowed | None, rows: int) -> Int32s:
    """[B] pages that a KV head of each of so many decode rows reads; 0: all of its row's."""
    counts = np.zeros(rows, np.int32)
    if narrowed is not None:
        counts[narrowed.rows] = narrowed.counts
    return counts


def reads_of(plan: StepPlan, narrowed: Narrowed | None, page_size: int) -> Int32s | None:
    """[B] tokens that each decode row reads where a hook chooses. None: no row is narrowed."""
    if narrowed is None:
        return None
    reads = plan.context_lens[: plan.num_decodes].copy()
    reads[narrowed.rows] = narrowed.counts * page_size
    return reads


def rows_of(plan: StepPlan) -> Int32s:
    """[T], the row of each new token."""
    return np.repeat(np.arange(len(plan.row_slots), dtype=np.int32), plan.query_lens)
