"""What a router keeps on the disk: SQLite files in a folder that only this user may read.

A row belongs to a tenant, and no other tenant finds it. Ids are random, and never part of a path.
Deleted bytes are overwritten. Routers of one host may share the folder: SQLite's log of changes
(WAL) lets them read while one of them writes. All work is done on one thread, off the event loop.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

Value = TypeVar("Value")
BUSY_S: Final = 5.0
"""Longest wait for another router that writes."""
DAY_S: Final = 86_400.0
"""Seconds."""


class StoreError(Exception):
    """The folder cannot be used; the message says why."""


class Bounds(NamedTuple):
    """What is kept of one tenant."""

    most_bytes: int
    most_number: int
    most_days: float


class Database:
    """One SQLite file. Any event loop may use it.

    Args:
        folder: is made, for this user alone, if it is not there.
        name: of the file.
        schema: its tables. Those with a `tenant` have `bytes`, too.
        version: of the schema.
    """

    def __init__(self, folder: str, name: str, schema: str, version: int) -> None:
        """Opens the file.

        Raises:
            StoreError: the folder is a link, others may read it, or its file cannot be used.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"baton-{name.partition('.')[0]}")
        try:
            self.folder = own_folder(Path(folder))
            file = _guarded(self.folder / name)
            self.connection = self._thread.submit(_open, file, schema, version).result()
        except (OSError, sqlite3.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise StoreError(f"{folder}: {why}") from None

    def close(self) -> None:
        """Closes the file after the work that was begun."""
        self._thread.submit(self.connection.close)
        self._thread.shutdown()

    async def run(self, work: Callable[..., Value], *arguments: object) -> Value:
        """Does some work on the thread, which alone may use `connection`.

        Raises:
            sqlite3.Error: the disk is full, say.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    @contextmanager
    def written(self) -> Iterator[sqlite3.Connection]:
        """A transaction that writes."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def held(self, table: str, tenant: str) -> tuple[int, int]:
        """The number of a tenant's rows, and their bytes."""
        query = f"SELECT count(*), coalesce(sum(bytes), 0) FROM {table} WHERE tenant = ?"
        count, held_bytes = self.connection.execute(query, (tenant,)).fetchone()
        return count, held_bytes


def own_folder(folder: Path) -> Path:
    """The folder, which is no link and which only this user may use. It is made if need be.

    Raises:
        StoreError: it is another one.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = folder.lstat()
    if not stat.S_ISDIR(held.st_mode) or held.st_uid != os.geteuid() or held.st_mode & 0o077:
        raise StoreError(f"{folder} must be a folder of this user's own, with mode 0700")
    return folder


def _guarded(file: Path) -> Path:
    """The file, which is no link and which only this user may use."""
    for name in (file, *(Path(f"{file}{end}") for end in ("-wal", "-shm"))):
        if name.is_symlink():
            raise StoreError(f"{name} is a link")
    # SQLite gives its other files the mode of this one.
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    file.chmod(0o600)
    return file


def _open(file: Path, schema: str, newest: int) -> sqlite3.Connection:
    database = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    _use_wal(database)
    for pragma in (
        f"busy_timeout = {int(BUSY_S * 1e3)}",
        "synchronous = NORMAL",
        "foreign_keys = ON",
        "secure_delete = ON",
    ):
        database.execute(f"PRAGMA {pragma}")
    database.execute("BEGIN IMMEDIATE")
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        for statement in schema.split(";"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {newest}")
    database.execute("COMMIT")
    if version not in (0, newest):
        database.close()
        raise StoreError(f"{file} has version {version}, and this release reads {newest}")
    return database


def _use_wal(database: sqlite3.Connection) -> None:
    """SQLite does not wait by itself for another process that changes the same new file to a
    write-ahead log: routers that start together would meet there."""
    ends_s = time.monotonic() + BUSY_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > ends_s:
                raise
            time.sleep(0.01)
        else:
            return
