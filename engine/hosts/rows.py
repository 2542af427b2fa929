"""The figures of ranks as an agent passes them on: rows of a file that they write
(`engine.ranks.stats`)."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

from engine.hosts.processes import Share

FILE: Final = "stats"
COLUMNS: Final = 9
"""Numbers in the row of a rank; `engine.ranks.stats` names them."""
ROW_BYTES: Final = COLUMNS * 8
"""They are float64."""


def mapped(folder: Path, count: int, *, create: bool) -> mmap.mmap:
    """Rows of `count` ranks, of a host's private folder, which may go afterwards. Who creates the
    file does so before any rank maps it."""
    path, size = folder / FILE, count * ROW_BYTES
    if create:
        path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


class Rows:
    """Rows of all ranks, in the private folder of a host that makes it."""

    def __init__(self, folder: Path, share: Share) -> None:
        """Makes the file. The folder may go afterwards."""
        self._memory = mapped(folder, share.size, create=True)
        self._share = share

    def here(self) -> bytes:
        """Rows of the ranks of this host."""
        first, count = self._share.first, self._share.count
        return self._memory[first * ROW_BYTES : (first + count) * ROW_BYTES]
