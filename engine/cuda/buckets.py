"""Batch sizes that have a graph: a decode step is padded up to the next of them."""

from __future__ import annotations

from bisect import bisect_left

SMALL = (1, 2, 4)
SPACING = 8


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then every multiple of 8, the last one holding `max_rows`."""
    small = tuple(size for size in SMALL if size < max_rows)
    last = -(-max_rows // SPACING) * SPACING
    if max_rows in SMALL:
        return (*small, max_rows)
    return (*small, *range(SPACING, last + 1, SPACING))


def bucket_of(rows: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that holds `rows`."""
    return sizes[bisect_left(sizes, rows)]
