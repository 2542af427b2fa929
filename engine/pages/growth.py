"""Pages for tokens that sequences may store ahead of what is known of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.pages.blocks import BlockManager


def grow_oldest(
    blocks: BlockManager,
    table: NDArray[np.int32],
    ends: NDArray[np.int32],
    rows: NDArray[np.intp],
    missing: NDArray[np.int32],
    seniority: NDArray[np.int64],
) -> None:
    """Gives sequences the pages that they miss, oldest first, as long as there are any.

    Args:
        blocks: the group's pages.
        table: by slot, the pages of its sequence.
        ends: by slot, the index behind its last page; moved on.
        rows: [R] slots.
        missing: [R] pages that each misses.
        seniority: [R] order of admission.
    """
    oldest_first = np.argsort(seniority, kind="stable")
    served = oldest_first[missing[oldest_first].cumsum() <= blocks.available]
    grown, counts = rows[served], missing[served]
    places = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    places += np.repeat(ends[grown], counts)
    table[np.repeat(grown, counts), places] = blocks.allocate_apart(int(counts.sum()))
    ends[grown] += counts
