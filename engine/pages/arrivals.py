"""Pages whose KV came from another worker or a lower tier, until the next step is planned."""

from __future__ import annotations

from typing import Final

import numpy as np

from engine.types import PageIds

NO_PAGES: Final[PageIds] = np.zeros(0, np.int32)


class Arrivals:
    """Belongs to the step loop's thread."""

    def __init__(self) -> None:
        self._noted: list[PageIds] = []
        self._undrafted: list[PageIds] = []

    def note(self, pages: PageIds, *, drafts: bool = False) -> None:
        """The KV of these held pages has come, and with `drafts` what a draft head keeps."""
        if pages.size:
            self._noted.append(pages)
            self._undrafted += [] if drafts else [pages]

    def take(self) -> PageIds:
        """Pages noted since the last call."""
        if not self._noted:
            return NO_PAGES
        noted, self._noted = self._noted, []
        return np.concatenate(noted)

    def take_undrafted(self) -> PageIds:
        """Pages noted since the last call without what a draft head keeps."""
        if not self._undrafted:
            return NO_PAGES
        noted, self._undrafted = self._undrafted, []
        return np.concatenate(noted)
