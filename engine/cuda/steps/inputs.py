"""The inputs of the forward pass of padded steps, at fixed addresses."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.grouped import GroupEnds
from engine.attention.paged import PagedStep
from engine.cuda.kernels import StepInputs, unpack_step
from engine.cuda.mixers.base import RowEnds
from engine.cuda.speculation.columns import Columns, unpack_columns
from engine.cuda.steps.packing import PackedGroup, PackedStep
from engine.cuda.steps.shapes import Shape
from engine.speculation.tables import SlotTables
from engine.step.hooks import DecodeRows


class StepColumns(NamedTuple):
    """The T tokens of a step, [T] int32 each."""

    token_ids: Tensor
    positions: Tensor
    stores: Tensor


class Inputs:
    """Ids, positions, places in the pools and page tables, for the largest shape."""

    def __init__(
        self,
        largest: Shape,
        max_rows: int,
        max_pages: Sequence[int],
        device: torch.device,
        drafts: SlotTables | None = None,
    ) -> None:
        """`max_pages`: for each group the pages of its longest row. `drafts`: the tables by slot
        where drafts are verified, and decode rows are as long as the device knows."""
        shape = 3, largest.tokens
        self._columns = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in max_pages]
        self._tables = [
            torch.zeros(max_rows, pages, dtype=torch.int32, device=device) for pages in max_pages
        ]
        self._contexts = [torch.ones(max_rows, dtype=torch.int32, device=device) for _ in max_pages]
        self._drafts = drafts
        self.kept = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """See `unpack_columns`."""

    @property
    def ids(self) -> Tensor:
        """int32: of each decode row its tokens, then those of prompts."""
        return self._columns[0][0]

    def columns(self, tokens: int) -> StepColumns:
        """Columns of so many tokens, in group 0."""
        return StepColumns(*self._columns[0][:, :tokens])

    def spread(self, packed: PackedStep, token_table: Tensor, page_size: int) -> list[StepInputs]:
        """Queues the kernels that fill in the inputs of a step; returns the parts that the step
        reads, by group. Ids and positions of other groups than the first have no meaning."""
        shape, spread = packed.shape, []
        for index, group in enumerate(_groups(packed)):
            own = self._columns[index][:, : shape.tokens]
            table, contexts = self._tables[index][: shape.rows], group.contexts
            if group.is_state:
                spread.append(StepInputs(own[0], own[1], own[2], group.page_table, contexts))
                continue
            if self._drafts is not None:
                contexts = self._contexts[index][: shape.rows]
            inputs = StepInputs(own[0], own[1], own[2], table, contexts)
            self._unpack(packed, group, token_table, page_size, inputs)
            if group.stores is not None:
                inputs.stores[shape.decode_tokens :] = group.stores
            spread.append(inputs)
        if packed.prompts is not None:
            first = shape.decode_tokens
            self._columns[0][:2, first : shape.tokens] = packed.prompts.tokens[:2]
        return spread

    def _unpack(
        self,
        packed: PackedStep,
        group: PackedGroup,
        token_table: Tensor,
        page_size: int,
        into: StepInputs,
    ) -> None:
        given = group.header, packed.slots, group.contexts
        if self._drafts is None:
            unpack_step(*given, group.page_table, token_table, page_size, into)
            return
        known = Columns(*given, packed.least, packed.contexts, group.page_table)
        unpack_columns(known, self._drafts, page_size, packed.shape.width, into, self.kept)


def _groups(packed: PackedStep) -> list[PackedGroup]:
    stores = None if packed.prompts is None else packed.prompts.tokens[2]
    first = PackedGroup(packed.header, packed.contexts, stores, packed.page_table)
    return [first, *packed.others]


def attention_of(packed: PackedStep, inputs: Sequence[StepInputs]) -> list[PagedStep]:
    """The step in the form of the attention backends, by group."""
    shape = packed.shape
    return [
        PagedStep(
            shape.decodes,
            own.contexts,
            own.page_table,
            packed.prompts.starts if packed.prompts else None,
            shape.prompt_tokens,
            all_fresh=False,
            differ=shape.differ,
            width=shape.width,
        )
        for own in inputs
    ]


def ends_of(packed: PackedStep, inputs: Sequence[StepInputs]) -> RowEnds | None:
    """All tokens of decode rows, and the last ones of prompts; None if there is no prompt."""
    if packed.prompts is None:
        return None
    rows = packed.shape.decodes, packed.shape.width
    ends = [GroupEnds(own.contexts, own.page_table, *rows) for own in inputs]
    return RowEnds(packed.prompts.ends, ends)


def narrowed_of(
    packed: PackedStep, inputs: StepInputs, most: int, page_size: int
) -> DecodeRows | None:
    """The decode rows for the hook that chooses at most so many pages for a KV head; None if no row
    is narrowed."""
    if packed.counts is None:
        return None
    count = packed.shape.decodes
    return DecodeRows(
        inputs.page_table[:count], inputs.contexts[:count], packed.counts, most, page_size
    )
