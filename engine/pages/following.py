"""Pages of sequences that go on from others'."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.pages.blocks import BlockManager


def follow(
    blocks: BlockManager,
    table: NDArray[np.int32],
    own: NDArray[np.intp],
    those: NDArray[np.intp],
) -> None:
    """Each row lets its pages go and shares those of another row.

    Args:
        blocks: the pages.
        table: [rows, P], which is changed.
        own: [N] rows.
        those: [N] rows of whose pages each gets a share.
    """
    before = table[own]
    after = table[those]
    changed = before != after
    table[own] = after
    rows = np.flatnonzero(changed.any(1)).tolist()
    for row in rows:  # Nobody holds a page twice in a row.
        blocks.share(after[row, changed[row]])
    for row in rows:
        blocks.release(before[row, changed[row]])
