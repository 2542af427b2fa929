"""How rank 0 gets the memory files of the other ranks' host slots.

The child process of a store maps the slots of all ranks (`engine.tiers.stores.child`), and rank 0
starts it. So each rank sends its memory file over a socket in the private folder, before it reports
`READY`.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Final

MEMORY: Final = "memory"
_RANK: Final = struct.Struct("<i")


class MemoryInbox:
    """Rank 0's side.

    Args:
        folder: the private folder.
        size: number of ranks.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._others = size - 1
        self._files: dict[int, int] = {}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(folder / MEMORY))
        self._socket.listen(self._others)

    def receive(self) -> list[int]:
        """The memory files of ranks 1, 2, ..., which have sent them. `close` closes them."""
        for _ in range(self._others):
            connection, _ = self._socket.accept()
            with connection:
                message, files, _, _ = socket.recv_fds(connection, _RANK.size, 1)
                (rank,) = _RANK.unpack(message)
                (self._files[rank],) = files
        return [self._files[rank] for rank in range(1, self._others + 1)]

    def close(self) -> None:
        """Closes the socket and the files."""
        self._socket.close()
        while self._files:
            os.close(self._files.popitem()[1])


def send_memory(folder: Path, rank: int, file: int) -> None:
    """Sends a rank's memory file."""
    with socket.socket(socket.AF_UNIX) as to_rank_0:
        to_rank_0.connect(str(folder / MEMORY))
        socket.send_fds(to_rank_0, [_RANK.pack(rank)], [file])
