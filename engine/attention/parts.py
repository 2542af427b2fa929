"""Split-KV for decode attention: into how many parts each context is cut.

An *item* is one KV head of one row. Either one program reads its whole context, or the context is
cut into *parts*, each read by a program of its own, and a second kernel merges their results.

Cutting costs that second kernel and the start of each part. It pays off where programs would leave
processors idle: when there are few items, or when some contexts are much longer than the others.
So a batch size has up to two divisions, one for contexts of like lengths and one for unlike ones,
and the host picks one before each step (`lengths_differ`). CUDA graphs are captured for both.
Measurements: `bench/history/engine.md`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PROCESSORS = 132
"""Streaming multiprocessors of an H100 or H200. With no more items than that, contexts are cut even
if they have like lengths, so that no processor is idle."""
PROGRAMS_OF_FEW = 512
"""Programs to aim at with few items of like lengths: about four for each processor."""
MOST_PROGRAMS = 4096
"""Most programs for contexts of unlike lengths, unless `LEAST_PARTS` a context are more. A program
whose context is too short for its part returns at once."""
LEAST_PARTS, MOST_PARTS = 8, 16
"""Bounds of `Division.most` for unlike lengths, and for all lengths where a batch has one division.
A short context has fewer parts."""
LEAST_TOKENS_OF_FEW = 64
"""Least tokens of a part, with few items."""
MOST_LEAST_TOKENS = 512
"""Bound of the least tokens of a part, with many items. With 256 rows of uneven lengths, 64 and
2,048 were slower. 1,024 were as fast, and 6 % faster with 96 log-normal rows. Numbers:
`bench/README.md`, 2026-11-27."""
LONGER = 1.4
"""Rows are uneven if the longest has more than this many times the mean length."""


class Tiles(NamedTuple):
    """How a program reads its part of a context."""

    block: int
    """Tokens that are read in one iteration."""
    warps: int
    stages: int
    """Iterations whose loads are in flight at once."""


class Division(NamedTuple):
    """The division of contexts into parts."""

    most: int
    """Most parts of a row."""
    least_tokens: int
    """Least tokens of a part. A shorter row has fewer."""
    tiles: Tiles


class TileSet(NamedTuple):
    """The tiles of a kernel. A program with large tiles reads faster. More programs with smaller
    ones fit a processor."""

    few: Tiles
    """For parts of few items of like lengths."""
    parts: Tiles
    """For all other parts: of rows that differ in length, and where a batch has one division."""
    large: Tiles
    """For uncut contexts. More items use smaller tiles."""
    middle: Tiles
    small: Tiles


LARGE, MIDDLE, SMALL = Tiles(128, 4, 3), Tiles(64, 4, 3), Tiles(32, 2, 4)
OF_FEW = Tiles(64, 2, 3)
PLAIN = TileSet(OF_FEW, LARGE, LARGE, MIDDLE, SMALL)
"""For 16 bits."""
_WIDE, _WIDEST = Tiles(64, 4, 3), Tiles(32, 4, 3)
WIDE = TileSet(_WIDE, _WIDE, _WIDE, _WIDE, SMALL)
WIDEST = TileSet(*[_WIDEST] * 5)
"""For heads of more than 128 and 256 numbers. Compiled for Hopper, larger tiles spill registers;
not measured on a GPU yet."""
FP8_WHOLE = Tiles(64, 2, 5)
FP8 = TileSet(Tiles(128, 2, 2), FP8_WHOLE, FP8_WHOLE, FP8_WHOLE, FP8_WHOLE)
"""For FP8. Conversion is the bottleneck, not memory, so all tiles have few warps. Those of `few`
are large, with two stages. The others are small, with five."""


def tiles_of(head_dim: int) -> TileSet:
    """For 16 bits."""
    return PLAIN if head_dim <= 128 else WIDE if head_dim <= 256 else WIDEST


def has_two(rows: int, kv_heads: int) -> bool:
    """Whether a batch of this size has two divisions."""
    return PROGRAMS_OF_FEW // (rows * kv_heads) < MOST_PARTS if rows else False


def division(rows: int, kv_heads: int, *, differ: bool, tiles: TileSet = PLAIN) -> Division:
    """The division of a batch of this size, whose rows differ in length or are alike."""
    items = rows * kv_heads
    is_few = items <= PROCESSORS
    if differ or not has_two(rows, kv_heads):
        most = MOST_PARTS if is_few else MOST_PROGRAMS // items
        least = LEAST_TOKENS_OF_FEW if is_few else _least_tokens(items)
        return Division(min(max(most, LEAST_PARTS), MOST_PARTS), least, tiles.parts)
    if is_few:
        return Division(PROGRAMS_OF_FEW // items, LEAST_TOKENS_OF_FEW, tiles.few)
    if items <= 2.5 * PROCESSORS:
        return Division(1, 1, tiles.large)
    return Division(1, 1, tiles.middle if items <= 5 * PROCESSORS else tiles.small)


def lengths_differ(contexts: NDArray[np.int32], kv_heads: int) -> bool:
    """Whether contexts differ so much that the division for such is faster.

    Args:
        contexts: [B] tokens of each row.
        kv_heads: KV heads of each row.
    """
    rows, longest = len(contexts), int(contexts.max(initial=0))
    has_parts = longest >= 2 * _least_tokens(rows * kv_heads)
    return has_parts and longest * rows > LONGER * int(contexts.sum(dtype=np.int64))


def _least_tokens(items: int) -> int:
    """Minimum tokens of a part, given how many items there are. The cost to begin a part pays off
    less if many keep the device busy."""
    return min(items, MOST_LEAST_TOKENS)
