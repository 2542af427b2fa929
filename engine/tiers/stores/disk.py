"""`disk:PATH?gib=N`: a disk of this host. One file of equal places, read and written directly.

The index is in memory and in SQLite, so that it outlives the process. An object's row is written
after its bytes and deleted before its place is written again. What a lost power supply leaves is
found by the checksum. One process uses a folder at a time.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from engine.tiers.stores.protocol import Buffers, StoreError

_OURS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_DIRECT_READS = {22, 95}
"""EINVAL, ENOTSUP: a file system in memory, for example."""


class DiskStore:
    """See the module; the least recently used object makes place.

    Args:
        path: a folder, made if it is missing.
        size: most bytes of the file.
        object_bytes: bytes of an object.

    Raises:
        StoreError: it is in use, not writable or too small, or the disk is full.
    """

    shared = False

    def __init__(self, path: str, size: int, object_bytes: int) -> None:
        self._object_bytes = object_bytes
        self._num_places = size // object_bytes
        if not self._num_places:
            raise StoreError(f"disk:{path}: {size} bytes hold no object of {object_bytes}")
        try:
            self._open(Path(path))
        except (OSError, sqlite3.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise StoreError(f"disk:{path}: {why}") from error

    def _open(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.fdopen(os.open(folder / "lock", _OURS, 0o600), "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"disk:{folder} is in use by another process") from error
        self._fd = _open_direct(folder / "pages")
        os.posix_fallocate(self._fd, 0, self._num_places * self._object_bytes)
        os.ftruncate(self._fd, self._num_places * self._object_bytes)
        os.close(os.open(folder / "index", _OURS, 0o600))
        self._index = sqlite3.connect(folder / "index", isolation_level=None)
        self._index.execute("PRAGMA journal_mode = WAL")
        self._index.execute("PRAGMA synchronous = NORMAL")
        self._index.execute(
            "CREATE TABLE IF NOT EXISTS objects"
            " (name TEXT PRIMARY KEY, place INTEGER UNIQUE, bytes INTEGER) WITHOUT ROWID"
        )
        self._read_index()

    def _read_index(self) -> None:
        """Objects of another size, or beyond the end of the file, are dropped."""
        self._index.execute(
            "DELETE FROM objects WHERE bytes != ? OR place >= ?",
            (self._object_bytes, self._num_places),
        )
        rows = self._index.execute("SELECT name, place FROM objects ORDER BY place")
        self._places: OrderedDict[str, int] = OrderedDict(rows)
        used = set(self._places.values())
        self._free = [place for place in range(self._num_places) if place not in used]

    def lookup(self, keys: Sequence[str]) -> list[bool]:
        """See `PageStore`."""
        return [key in self._places for key in keys]

    def load(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        """See `PageStore`."""
        return [self._load(key, parts) for key, parts in zip(keys, buffers, strict=True)]

    def _load(self, key: str, parts: Buffers) -> bool:
        place = self._places.get(key)
        if place is None:
            return False
        self._places.move_to_end(key)
        read = os.preadv(self._fd, list(parts), place * self._object_bytes)
        return read == self._object_bytes

    def store(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        """See `PageStore`."""
        return [self._store(key, parts) for key, parts in zip(keys, buffers, strict=True)]

    def _store(self, key: str, parts: Buffers) -> bool:
        if key in self._places:
            return True
        place = self._take_place()
        try:
            written = os.pwritev(self._fd, list(parts), place * self._object_bytes)
        except OSError:
            self._free.append(place)
            raise
        if written != self._object_bytes:
            self._free.append(place)
            return False
        self._index.execute(
            "INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", (key, place, self._object_bytes)
        )
        self._places[key] = place
        return True

    def _take_place(self) -> int:
        if not self._free:
            oldest, _ = next(iter(self._places.items()))
            self.remove([oldest])
        return self._free.pop()

    def remove(self, keys: Sequence[str]) -> None:
        """See `PageStore`."""
        for key in keys:
            place = self._places.pop(key, None)
            if place is not None:
                self._index.execute("DELETE FROM objects WHERE name = ?", (key,))
                self._free.append(place)

    def close(self) -> None:
        """See `PageStore`."""
        self._index.close()
        os.close(self._fd)
        self._lock.close()


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, _OURS | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno not in _NO_DIRECT_READS:
            raise
        return os.open(path, _OURS, 0o600)
