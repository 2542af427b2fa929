"""The figures of ranks as an agent passes them on: rows of a file that they write
(`engine.ranks.stats`)."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

from engine.hosts.processes import Share

FILE: Final = "stats"
COLUMNS: Final = 8
ROW_BYTES: Final = COLUMNS * 8
"""Numbers are float64."""


class Rows:
    """Rows of all ranks, in the private folder of a host that makes it."""

    def __init__(self, folder: Path, share: Share) -> None:
        """Makes the file. The folder may go afterwards."""
        path = folder / FILE
        path.write_bytes(bytes(share.size * ROW_BYTES))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._share = share

    def here(self) -> bytes:
        """Rows of the ranks of this host."""
        first, count = self._share.first, self._share.count
        return self._memory[first * ROW_BYTES : (first + count) * ROW_BYTES]
