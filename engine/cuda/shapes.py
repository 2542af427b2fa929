"""Shapes that have a graph: a step is padded up to the smallest of them that holds it.

A step that only decodes has a bucket for its rows. A short piece of prompt, with or without
decode rows beside it, is the rest of a prompt that is cached, a prompt that is short, or a decode
worker's own prefill: launched one by one its kernels would take the host longer than the device,
and the decode rows would wait for it. Longer pieces keep the device busy meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from engine.step import StepPlan

SMALL = (1, 2, 4)
SPACING = 8
MIXED_SPACING = 32
"""Rows are few beside the prompt's tokens."""
PIECES = (64, 128, 192)
"""Prompt tokens beside decode rows. The last is what a decode worker computes of prompts in one
step; fewer are the end of a prompt, or all that the step has time for."""
PROMPT_TOKENS = PIECES[-1]
PROMPT_ROWS = 4


class Shape(NamedTuple):
    """The size that a step is padded to."""

    decodes: int
    """Decode rows, the first; as many tokens."""
    prompt_rows: int = 0
    """Rows of prompt tokens; one more holds the padding."""
    prompt_tokens: int = 0

    @property
    def rows(self) -> int:
        """All of them."""
        return self.decodes + self.prompt_rows

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.decodes + self.prompt_tokens


class Shapes:
    """The shapes of an executor, and which of them a step takes."""

    def __init__(self, max_rows: int) -> None:
        """`max_rows`: most decode rows of a step."""
        self._decodes = bucket_sizes(max_rows)
        self._beside = bucket_sizes(max_rows, (SPACING,), MIXED_SPACING)

    @property
    def all(self) -> list[Shape]:
        """Largest first: the memory of one holds the others'."""
        mixed = [_with_prompts(rows, piece) for rows in self._beside for piece in PIECES]
        plain = [Shape(rows) for rows in self._decodes]
        return sorted(mixed + plain, key=lambda shape: shape.tokens, reverse=True)

    def of(self, plan: StepPlan) -> Shape | None:
        """The smallest that holds the step; None: it takes none, its kernels run one by one."""
        prompt_tokens = plan.num_tokens - plan.num_decodes
        if prompt_tokens == 0:
            return Shape(bucket_of(plan.num_decodes, self._decodes))
        rows = len(plan.row_slots) - plan.num_decodes
        if plan.scores or rows > PROMPT_ROWS or prompt_tokens > PROMPT_TOKENS:
            return None
        piece = bucket_of(prompt_tokens, PIECES)
        return _with_prompts(bucket_of(plan.num_decodes, self._beside), piece)


def _with_prompts(decodes: int, piece: int) -> Shape:
    return Shape(decodes, PROMPT_ROWS + 1, piece)


def bucket_sizes(
    max_rows: int, small: tuple[int, ...] = SMALL, spacing: int = SPACING
) -> tuple[int, ...]:
    """The small ones, then every multiple of the spacing, the last one holding `max_rows`."""
    if max_rows <= small[-1]:
        return (*(size for size in small if size < max_rows), max_rows)
    last = -(-max_rows // spacing) * spacing
    return (*small, *range(spacing, last + 1, spacing))


def bucket_of(rows: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that holds `rows`."""
    return sizes[bisect_left(sizes, rows)]
