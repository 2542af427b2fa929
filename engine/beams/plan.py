"""A search in one step: what the device needs to choose its beams before the host knows them.

A step is planned before the one in flight has settled. So the device chooses
(`engine.sampling.beams`), and the host follows when the step settles (`engine.schedule.choosing`):
both by the same candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class SearchPlan:
    """A search of W beams, of which n draw: all, or one behind the prompt."""

    slots: Int32s
    """[W], best beam first."""
    draws: Int32s
    """[n]. The draws whose candidates it chooses from. Other ranks than the first have none."""
    ends: Int32s
    """[E]. Ids that end a sequence: no beam goes on with them."""
    scores: NDArray[np.float32] | None
    """[n]. Scores of the beams that draw; None: the device has them."""
    rows: Int32s
    """[W]. The beams' rows; empty behind the prompt."""
    followed: int
    """Leading pages of each row that are its parent's, by what the step before has chosen, which
    the page table does not show yet; 0: it does."""
    moved: tuple[Int32s, ...]
    """By group, [W]: the page into which each beam stores in this step, if the next one stores into
    it, too. Its parent's becomes its own when the beams are chosen. Empty: no such page."""
