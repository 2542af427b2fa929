"""Shapes that have a graph. A step is padded to the smallest shape that holds it.

Launching a step's kernels one by one takes the host 8 ms and more, because every launch gives the
interpreter to other threads. A graph is one launch. The shapes are:

- decode rows alone, in buckets. Most buckets have two shapes, one for rows that differ in length
  and one for rows alike (`engine.attention.parts`);
- decode rows with a short chunk of a prompt, which is all that a decode worker computes beside
  them;
- prompts alone, up to the longest graph or the largest step without decode rows;
- if a hook may choose pages in graphs: decode rows of which it narrows some, alone as above, or
  with a chunk of the largest size;
- if drafts are verified: decode rows of several tokens, alone in wider buckets, or with a chunk of
  the largest size.

Steps without a shape are longer and keep the device busy meanwhile, or read the hidden states of
whole prompts, or hold many short prompts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from engine.attention.parts import has_two, lengths_differ
from engine.bounds import Bounds
from engine.cuda.steps.staging import Int32s
from engine.step.plan import StepPlan

SMALL = (1, 2, 4)
SPACING = 8
MIXED_SPACING = 32
"""Distance of the buckets of decode rows beside a prompt. It is wide, because these rows are few
beside the prompt's tokens."""
WIDE_SMALL = (1, 2, 4, 8, 16, 24)
WIDE_SPACING = 32
"""Buckets of decode rows of several tokens. They are few, because there are such for each width."""
CHUNKS = tuple(range(64, 192 + 1, 32))
"""Prompt tokens beside decode rows. The last is the chunk that a decode worker computes in one
step. Fewer are the end of a prompt."""
PROMPT_SPACING = 64
"""Distance of the shapes of prompts alone, tokens."""
LONGEST_GRAPH = 2048
"""Tokens of the longest graph."""
PROMPT_ROWS = 8
"""Rows of prompts in a graph; a step of more prompts launches its kernels one by one."""

SPARE_INTEGERS = 1 << 16
"""Room in the staging buffer for copies, samples of many choices and gaps between sections."""


class Shape(NamedTuple):
    """The size that a step is padded to."""

    decodes: int
    """Decode rows. They come first and have `width` tokens each."""
    prompt_rows: int = 0
    """Rows of prompt tokens. One more row holds the padding."""
    prompt_tokens: int = 0
    differ: bool = True
    """Whether decode rows differ in what they read (`engine.attention.parts`)."""
    narrowed: bool = False
    """Whether some decode rows read only the pages that a hook chooses."""
    width: int = 1
    adapted: bool = False
    """Whether some rows have an adapter."""

    @property
    def decode_tokens(self) -> int:
        """Number of decode rows' tokens."""
        return self.decodes * self.width

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return self.decodes + self.prompt_rows

    @property
    def tokens(self) -> int:
        """Number of all tokens."""
        return self.decode_tokens + self.prompt_tokens


class Shapes:
    """The shapes of an executor, and the choice of one for a step."""

    def __init__(
        self,
        bounds: Bounds,
        kv_heads: int,
        *,
        narrows: bool = False,
        widths: tuple[int, ...] = (1,),
        adapts: bool = False,
        mixes: bool = True,
        prompts: bool = True,
    ) -> None:
        """`narrows`: whether a graph may have narrowed rows. `widths`: tokens of decode rows.
        `adapts`: whether rows may have adapters; steps without any have shapes of their own.
        `mixes`: whether prompts are computed beside decode rows. `prompts`: whether steps with
        prompts have shapes."""
        self._adapts = adapts
        self._kv_heads = kv_heads
        self._narrows = narrows
        self._widths = widths
        most, decodes = bounds.max_sequences, bounds.decodes
        self._decodes = bucket_sizes(most) if decodes else SMALL[: not prompts]
        mixes = mixes and prompts and decodes
        self._beside = bucket_sizes(most, (SPACING,), MIXED_SPACING) if mixes else ()
        self._wide = bucket_sizes(most, WIDE_SMALL, WIDE_SPACING) if decodes else ()
        self._alone = _prompt_sizes(bounds.max_step_tokens) if prompts else ()
        self.all = self._all()
        """All shapes, largest first, because the others reuse the largest one's memory."""

    def _all(self) -> list[Shape]:
        plain = [Shape(rows) for rows in self._decodes]
        mixed = [_with_prompts(rows, chunk) for rows in self._beside for chunk in CHUNKS]
        alone = [_with_prompts(0, tokens) for tokens in self._alone]
        alike = [shape._replace(differ=False) for shape in plain if self._has_two(shape)]
        shapes = [*plain, *alike, *mixed, *alone]
        if self._narrows:
            beside = [_with_prompts(rows, CHUNKS[-1]) for rows in self._beside]
            shapes += [each._replace(narrowed=True) for each in (*plain, *alike, *beside)]
        for width in self._widths[1:]:
            wide = [Shape(rows, width=width) for rows in self._wide]
            shapes += [each._replace(differ=False) for each in wide if self._has_two(each)]
            beside = [_with_prompts(rows, CHUNKS[-1], width) for rows in self._beside]
            shapes += [*wide, *beside]
        if self._adapts:
            shapes += [each._replace(adapted=True) for each in shapes]
        return sorted(shapes, key=lambda shape: shape.tokens, reverse=True)

    def of(self, plan: StepPlan, reads: Int32s | None = None) -> Shape | None:
        """The smallest shape that holds the step. None if there is none: its kernels run one by
        one.

        Args:
            plan: the step.
            reads: tokens that each decode row reads, if some rows are narrowed.
        """
        shape = self._smallest(plan)
        if shape is None or (reads is not None and not self._narrows):
            return None
        shape = shape._replace(adapted=plan.adapters.size > 0)
        if reads is not None:
            if shape.prompt_rows:  # One chunk is enough: graphs beside prompts take much memory.
                shape = shape._replace(prompt_tokens=CHUNKS[-1])
            shape = shape._replace(narrowed=True)
        if not self._has_two(shape):
            return shape
        lengths = plan.context_lens[: plan.num_decodes] if reads is None else reads
        return shape._replace(differ=lengths_differ(lengths, self._kv_heads))

    def grown(self, shape: Shape, decodes: int) -> Shape:
        """The shape with at least as many decode rows, of a bucket."""
        shape = shape._replace(decodes=decodes)
        return shape if self._has_two(shape) else shape._replace(differ=True)

    def larger(self, shape: Shape) -> Shape:
        """The next larger shape of decode rows alone; the same one if there is none."""
        decodes = bucket_of(shape.decodes + 1, self._decodes if shape.width == 1 else self._wide)
        return shape if decodes is None else self.grown(shape, decodes)

    def _has_two(self, shape: Shape) -> bool:
        """Whether there are two shapes of this size. Beside a prompt, decode rows are a small part
        of the step, and a second graph takes tens of megabytes."""
        return not shape.prompt_rows and has_two(shape.decodes, self._kv_heads)

    def _smallest(self, plan: StepPlan) -> Shape | None:
        width = plan.width if plan.num_decodes else 1
        if width not in self._widths:
            return None
        if plan.prompt_tokens == 0:
            decodes = bucket_of(plan.num_decodes, self._decodes if width == 1 else self._wide)
            return None if decodes is None else Shape(decodes, width=width)
        if plan.reads_all_states or len(plan.row_slots) - plan.num_decodes > PROMPT_ROWS:
            return None
        decodes = bucket_of(plan.num_decodes, self._beside) if plan.num_decodes else 0
        chunks = CHUNKS if width == 1 else CHUNKS[-1:]
        tokens = bucket_of(plan.prompt_tokens, chunks if decodes else self._alone)
        return None if decodes is None or tokens is None else _with_prompts(decodes, tokens, width)


def _with_prompts(decodes: int, tokens: int, width: int = 1) -> Shape:
    return Shape(decodes, PROMPT_ROWS + 1, tokens, width=width)


def _prompt_sizes(most_tokens: int) -> tuple[int, ...]:
    """Sizes up to the first that holds `most_tokens`."""
    last = -(-min(LONGEST_GRAPH, most_tokens) // PROMPT_SPACING) * PROMPT_SPACING
    return tuple(range(PROMPT_SPACING, last + 1, PROMPT_SPACING))


def bucket_sizes(
    max_rows: int, small: tuple[int, ...] = SMALL, spacing: int = SPACING
) -> tuple[int, ...]:
    """The small sizes, then every multiple of the spacing. The last one holds `max_rows`."""
    if max_rows <= small[-1]:
        return (*(size for size in small if size < max_rows), max_rows)
    last = -(-max_rows // spacing) * spacing
    return (*small, *range(spacing, last + 1, spacing))


def bucket_of(count: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of `sizes` that holds `count`, or None."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


def most_integers(bounds: Bounds, largest: Shape, max_pages: Sequence[int]) -> int:
    """Room in the staging buffer. `max_pages`: of the longest row, by group."""
    per_row = sum(max_pages) + 8 * len(max_pages)
    tokens = max(bounds.max_step_tokens, largest.tokens)
    rows = bounds.max_sequences + PROMPT_ROWS + MIXED_SPACING
    return rows * per_row + (3 + len(max_pages)) * tokens + SPARE_INTEGERS
