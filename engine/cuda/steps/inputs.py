"""The inputs of the forward pass of padded steps, at fixed addresses."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.grouped import GroupEnds
from engine.attention.paged import PagedStep
from engine.cuda.kernels import StepInputs, unpack_step
from engine.cuda.mixers.base import RowEnds
from engine.cuda.steps.packing import PackedGroup, PackedStep
from engine.cuda.steps.shapes import Shape
from engine.step.hooks import DecodeRows


class Inputs:
    """Ids, positions, places in the pools and page tables, for the largest shape."""

    def __init__(
        self, largest: Shape, max_rows: int, max_pages: Sequence[int], device: torch.device
    ) -> None:
        """`max_pages`: for each group the pages of its longest row."""
        shape = 3, largest.tokens
        self._columns = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in max_pages]
        self._tables = [
            torch.zeros(max_rows, pages, dtype=torch.int32, device=device) for pages in max_pages
        ]

    def spread(self, packed: PackedStep, token_table: Tensor, page_size: int) -> list[StepInputs]:
        """Queues the kernels that fill in the inputs of a step; returns the parts that the step
        reads, by group. Ids and positions of other groups than the first have no meaning."""
        shape, spread = packed.shape, []
        for columns, table, group in zip(self._columns, self._tables, _groups(packed), strict=True):
            own = columns[:, : shape.tokens]
            inputs = StepInputs(own[0], own[1], own[2], table[: shape.rows])
            unpack_step(
                group.header,
                packed.slots,
                group.contexts,
                group.page_table,
                token_table,
                page_size,
                inputs,
            )
            if group.stores is not None:
                inputs.stores[shape.decodes :] = group.stores
            spread.append(inputs)
        if packed.prompts is not None:
            self._columns[0][:2, shape.decodes : shape.tokens] = packed.prompts.tokens[:2]
        return spread


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
            group.contexts,
            own.page_table,
            packed.prompts.starts if packed.prompts else None,
            shape.prompt_tokens,
            all_fresh=False,
            differ=shape.differ,
        )
        for group, own in zip(_groups(packed), inputs, strict=True)
    ]


def ends_of(packed: PackedStep, inputs: Sequence[StepInputs]) -> RowEnds | None:
    """The last tokens of all rows; None if every row has just one token."""
    if packed.prompts is None:
        return None
    groups = zip(_groups(packed), inputs, strict=True)
    ends = [GroupEnds(group.contexts, own.page_table) for group, own in groups]
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
        inputs.page_table[:count], packed.contexts[:count], packed.counts, most, page_size
    )
