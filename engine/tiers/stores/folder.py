"""`dir:PATH?gib=N`: a folder that several hosts mount, such as NFS or 3FS. A file for each object.

A file gets its name when it is whole. The size is a bound for all writers together: each counts the
folder now and then, and removes the files that were read or written longest ago.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from engine.tiers.stores.protocol import Buffers, StoreError

COUNTED_SHARE = 16
"""The folder is counted again after a sixteenth of its bound was written from here."""
_TEMPORARY = ".new-"


class FolderStore:
    """See the module.

    Args:
        path: a folder, made if it is missing.
        size: most bytes of all files together.
        object_bytes: bytes of an object.

    Raises:
        StoreError: the folder cannot be written, or is too small.
    """

    shared = True

    def __init__(self, path: str, size: int, object_bytes: int) -> None:
        if size < object_bytes:
            raise StoreError(f"dir:{path}: {size} bytes hold no object of {object_bytes}")
        self._folder = Path(path)
        self._size = size
        self._object_bytes = object_bytes
        self._until_counted = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            probe = self._folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise StoreError(f"dir:{path}: {error}") from error

    def _path(self, key: str) -> Path:
        return self._folder / key[-2:] / key

    def lookup(self, keys: Sequence[str]) -> list[bool]:
        """See `PageStore`."""
        return [self._path(key).exists() for key in keys]

    def load(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        """See `PageStore`."""
        return [self._load(key, parts) for key, parts in zip(keys, buffers, strict=True)]

    def _load(self, key: str, parts: Buffers) -> bool:
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(fd).st_size != self._object_bytes:
                return True  # The caller finds that it is damaged, and removes it.
            os.utime(fd)
            return os.preadv(fd, list(parts), 0) == self._object_bytes
        finally:
            os.close(fd)

    def store(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        """See `PageStore`."""
        return [self._store(key, parts) for key, parts in zip(keys, buffers, strict=True)]

    def _store(self, key: str, parts: Buffers) -> bool:
        path = self._path(key)
        if path.exists():
            return True
        self._make_room()
        path.parent.mkdir(exist_ok=True)
        new = path.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            _write(new, parts, self._object_bytes)
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        return True

    def _make_room(self) -> None:
        self._until_counted -= self._object_bytes
        if self._until_counted > 0:
            return
        files = sorted((entry for entry in self._files()), key=lambda entry: entry[0])
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + self._object_bytes <= self._size - self._size // COUNTED_SHARE:
                break
            path.unlink(missing_ok=True)
            total -= size
        self._until_counted = self._size // COUNTED_SHARE

    def _files(self) -> list[tuple[float, int, Path]]:
        """Last use, bytes and path of each file. Others may remove files meanwhile."""
        found = []
        for path in self._folder.glob("??/*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        return found

    def remove(self, keys: Sequence[str]) -> None:
        """See `PageStore`."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing to end."""


def _write(path: Path, parts: Buffers, size: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if os.writev(fd, list(parts)) != size:
            raise OSError("the file system took a part of an object only")
    finally:
        os.close(fd)
