"""Pages whose KV came from another worker or a lower tier, until the next step is planned.

Some of them lack what a draft head keeps. That is known until they are given away.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.types import PageIds

NO_PAGES: Final[PageIds] = np.zeros(0, np.int32)


class Arrivals:
    """Belongs to the step loop's thread."""

    def __init__(self, num_pages: int) -> None:
        self._noted: list[PageIds] = []
        self._undrafted: list[PageIds] = []
        self._lacks = np.zeros(num_pages, np.bool_)
        """Pages without what a draft head keeps."""

    def note(self, pages: PageIds, *, undrafted: PageIds | None = None) -> None:
        """The KV of these held pages has come; of those that are `undrafted` without what a draft
        head keeps. None: of all."""
        if not pages.size:
            return
        lacking = pages if undrafted is None else undrafted
        self._lacks[pages] = False
        self._lacks[lacking] = True
        self._noted.append(pages)
        self._undrafted.append(lacking)

    def again(self, pages: PageIds) -> None:
        """The step that had these has failed: the next one has them, too."""
        self._noted += [pages] if pages.size else []

    def given(self, pages: PageIds) -> None:
        """These pages are given to somebody, who computes them if they do not come."""
        self._lacks[pages] = False

    def copied(self, source: int, target: int) -> None:
        """A page gets what another one has."""
        self._lacks[target] = self._lacks[source]

    def take(self) -> tuple[PageIds, PageIds]:
        """Pages noted since the last call: all, and those without what a draft head keeps."""
        return _taken(self._noted), _taken(self._undrafted)

    def undrafted(self, table: NDArray[np.int32], ends: NDArray[np.int32]) -> NDArray[np.int32]:
        """[R]: pages of each row up to the last one that lacks what a draft head keeps.

        Args:
            table: [R, P], pages of rows.
            ends: [R], pages that are looked at.
        """
        if not self._lacks.any():
            return np.zeros(len(table), np.int32)
        lacking = self._lacks[table] & (np.arange(table.shape[1]) < ends[:, None])
        behind = table.shape[1] - lacking[:, ::-1].argmax(1)
        return np.where(lacking.any(1), behind, 0).astype(np.int32)


def _taken(noted: list[PageIds]) -> PageIds:
    found = np.concatenate(noted) if noted else NO_PAGES
    noted.clear()
    return found
