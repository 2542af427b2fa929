"""`dir:PATH?gib=N`: a folder that several hosts mount, such as NFS or 3FS. A file for each object.

A file gets its name when it is whole. The size is a bound for all writers together: each counts the
folder now and then, and removes the files that were read or written longest ago.

Who else can write there may put links, pipes or folders into it. So only regular files in plain
folders are read, written or counted, and nothing outside is touched.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from engine.tiers.stores.protocol import Buffers, StoreError

COUNTED_SHARE = 16
"""The folder is counted again after a sixteenth of its bound was written from here."""
_TEMPORARY = ".new-"
_SHELF_CHARS = 2
"""An object lies in a folder that its last characters name: its shelf."""
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Follows no link, and waits for no writer of a pipe."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_IS_NONE_OF_OURS = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
"""What opening or replacing says where somebody has put a link, a folder or a pipe."""


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
        self._size = size
        self._object_bytes = object_bytes
        self._until_counted = 0
        try:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            probe = f"{_TEMPORARY}{secrets.token_hex(8)}"
            os.close(os.open(probe, _NEW, 0o600, dir_fd=self._folder))
            os.unlink(probe, dir_fd=self._folder)
        except OSError as error:
            raise StoreError(f"dir:{path}: {error.strerror}") from error

    @contextmanager
    def _shelf(self, name: str) -> Iterator[int | None]:
        """The folder of that name within ours; None where there is none."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _PLAIN, dir_fd=self._folder)
        except OSError as error:
            if error.errno not in (errno.ENOENT, *_IS_NONE_OF_OURS):
                raise
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)

    def lookup(self, keys: Sequence[str]) -> list[bool]:
        """See `PageStore`."""
        return [self._has(key) for key in keys]

    def _has(self, key: str) -> bool:
        with self._shelf(key[-_SHELF_CHARS:]) as shelf:
            return shelf is not None and _status(key, shelf) is not None

    def load(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        """See `PageStore`."""
        return [self._load(key, parts) for key, parts in zip(keys, buffers, strict=True)]

    def _load(self, key: str, parts: Buffers) -> bool:
        with self._shelf(key[-_SHELF_CHARS:]) as shelf:
            if shelf is None:
                return False
            try:
                fd = os.open(key, os.O_RDONLY | _PLAIN, dir_fd=shelf)
            except FileNotFoundError:
                return False
            except OSError as error:
                if error.errno not in _IS_NONE_OF_OURS:
                    raise
                return False
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return False
            if status.st_size != self._object_bytes:
                return True  # The caller finds that it is damaged, and removes it.
            os.utime(fd)
            return os.preadv(fd, list(parts), 0) == self._object_bytes
        finally:
            os.close(fd)

    def store(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        """See `PageStore`."""
        return [self._store(key, parts) for key, parts in zip(keys, buffers, strict=True)]

    def _store(self, key: str, parts: Buffers) -> bool:
        with suppress(FileExistsError):
            os.mkdir(key[-_SHELF_CHARS:], 0o700, dir_fd=self._folder)
        with self._shelf(key[-_SHELF_CHARS:]) as shelf:
            if shelf is None:
                return False
            if _status(key, shelf) is not None:
                return True
            self._make_room()
            new = f"{_TEMPORARY}{secrets.token_hex(8)}"
            try:
                _write(new, shelf, parts, self._object_bytes)
                os.rename(new, key, src_dir_fd=shelf, dst_dir_fd=shelf)
            except OSError as error:
                with suppress(FileNotFoundError):
                    os.unlink(new, dir_fd=shelf)
                if error.errno not in _IS_NONE_OF_OURS:
                    raise
                return False
        return True

    def _make_room(self) -> None:
        self._until_counted -= self._object_bytes
        if self._until_counted > 0:
            return
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        for _, size, (own, name) in files:
            if total + self._object_bytes <= self._size - self._size // COUNTED_SHARE:
                break
            with self._shelf(own) as shelf:
                if shelf is not None:
                    _remove(name, shelf)
            total -= size
        self._until_counted = self._size // COUNTED_SHARE

    def _files(self) -> Iterator[tuple[float, int, tuple[str, str]]]:
        """Last use, bytes, and folder and name of each file. Others may remove some meanwhile."""
        for own in os.listdir(self._folder):
            if len(own) != _SHELF_CHARS:
                continue
            with self._shelf(own) as shelf:
                for name in os.listdir(shelf) if shelf is not None else ():
                    if (status := _status(name, shelf)) is not None:
                        yield status.st_mtime, status.st_size, (own, name)

    def remove(self, keys: Sequence[str]) -> None:
        """See `PageStore`."""
        for key in keys:
            with self._shelf(key[-_SHELF_CHARS:]) as shelf:
                if shelf is not None:
                    _remove(key, shelf)

    def close(self) -> None:
        """See `PageStore`."""
        os.close(self._folder)


def _status(name: str, shelf: int | None) -> os.stat_result | None:
    """Status of a regular file; None where there is none."""
    try:
        status = os.stat(name, dir_fd=shelf, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _remove(name: str, shelf: int) -> None:
    with suppress(FileNotFoundError, IsADirectoryError):
        os.unlink(name, dir_fd=shelf)


def _write(name: str, shelf: int, parts: Buffers, size: int) -> None:
    fd = os.open(name, _NEW, 0o600, dir_fd=shelf)
    try:
        if os.writev(fd, list(parts)) != size:
            raise OSError("the file system took a part of an object only")
    finally:
        os.close(fd)
