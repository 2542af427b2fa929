"""What is told of pages that become free, and of free pages that are allocated."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.types import PageIds


class PageWatch(Protocol):
    """Is told of pages that become free and of free pages that are allocated."""

    damaged: int
    """Pages found written while they were free. Must stay 0."""

    def freed(self, pages: PageIds) -> None:
        """The pages are FREE from now on."""
        return

    def allocated(self, pages: PageIds) -> None:
        """FREE pages are about to be HELD."""
        return

    def idle(self, is_free: NDArray[np.bool_]) -> None:
        """There is time to check FREE pages. `is_free` has an entry for every page of the pool."""
        return


class Unwatched(PageWatch):
    """Checks nothing."""

    damaged = 0
