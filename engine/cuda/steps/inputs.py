"""The inputs of the forward pass of padded steps, at fixed addresses."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.paged import PagedStep
from engine.cuda.kernels import StepInputs, unpack_step
from engine.cuda.mixers.base import RowEnds
from engine.cuda.steps.packing import PackedStep
from engine.cuda.steps.shapes import Shape
from engine.step.hooks import DecodeRows


class Inputs:
    """Ids, positions, places in the pool and page tables, for the largest shape."""

    def __init__(self, largest: Shape, max_rows: int, max_pages: int, device: torch.device) -> None:
        self._columns = torch.zeros(3, largest.tokens, dtype=torch.int32, device=device)
        self._table = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device)

    def spread(self, packed: PackedStep, token_table: Tensor, page_size: int) -> StepInputs:
        """Queues the kernels that fill in the inputs of a step; returns the parts that the step
        reads."""
        shape = packed.shape
        columns = self._columns[:, : shape.tokens]
        inputs = StepInputs(columns[0], columns[1], columns[2], self._table[: shape.rows])
        unpack_step(
            packed.header,
            packed.slots,
            packed.contexts,
            packed.page_table,
            token_table,
            page_size,
            inputs,
        )
        if packed.prompts is not None:
            columns[:, shape.decodes :] = packed.prompts.tokens
        return inputs


def attention_of(packed: PackedStep, inputs: StepInputs) -> PagedStep:
    """The step in the form of the attention backend."""
    shape = packed.shape
    return PagedStep(
        shape.decodes,
        packed.contexts,
        inputs.page_table,
        packed.prompts.starts if packed.prompts else None,
        shape.prompt_tokens,
        all_fresh=False,
        differ=shape.differ,
    )


def ends_of(packed: PackedStep, inputs: StepInputs) -> RowEnds | None:
    """The last tokens of all rows; None if every row has just one token."""
    if packed.prompts is None:
        return None
    return RowEnds(packed.prompts.ends, packed.contexts, inputs.page_table)


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
