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

    def take(self) -> tuple[PageIds, PageIds]:
        """Pages noted since the last call: all, and those without what a draft head keeps."""
        if not self._noted:
            return NO_PAGES, NO_PAGES
        noted, undrafted = self._noted, self._undrafted
        self._noted, self._undrafted = [], []
        return np.concatenate(noted), np.concatenate(undrafted) if undrafted else NO_PAGES
