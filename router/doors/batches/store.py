"""Files and batches on the disk, each of one tenant.

Life of a file: its bytes are written under a random name; then it has a row, and belongs to its
tenant; deleted or expired, the row goes, and then the bytes. Bytes without a row are what a process
left that was killed. They are removed after a day.

Life of a batch: validating, in_progress, finalizing; then completed, failed, expired or cancelled
for good (`ENDED`). Its results grow under two names that its row has from the beginning. With its
last status they become files, in one transaction.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pydantic_core import from_json

from router.doors.batches.refusals import store_full, wrong
from router.doors.database import DAY_S, Bounds, Database, own_folder
from router.doors.paging import Page, lost_place
from router.one_line import json_of

if TYPE_CHECKING:
    import sqlite3

    from router.doors.http.statuses import JSON

FILE: Final = "files.sqlite"
CONTENTS: Final = "files"
"""The folder of contents, beside the SQLite file."""
VERSION: Final = 1
"""Number of the tables' form. A release that raises it reads, or refuses, the ones before."""
ENDED: Final = ("completed", "failed", "expired", "cancelled")
_SCHEMA: Final = """
CREATE TABLE files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, bytes INTEGER NOT NULL, name TEXT NOT NULL,
    purpose TEXT NOT NULL, created_s REAL NOT NULL, expires_s REAL NOT NULL, object BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX files_of ON files (tenant, created_s, id);
CREATE INDEX files_age ON files (expires_s);
CREATE TABLE batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, bytes INTEGER NOT NULL, status TEXT NOT NULL,
    created_s REAL NOT NULL, expires_s REAL NOT NULL, input TEXT NOT NULL, content TEXT NOT NULL,
    output TEXT NOT NULL, errors TEXT NOT NULL, object BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX batches_of ON batches (tenant, created_s, id);
CREATE INDEX batches_at ON batches (status, created_s)
"""
_OPEN: Final = f"status NOT IN {ENDED}"


_ID: Final = re.compile(r"(?:file-|batch_)([0-9a-f]{14})[0-9a-f]{32}")


class Batch(NamedTuple):
    """A row of a batch."""

    id: str
    tenant: str
    status: str
    content: str
    """Name of the input's content, as are the next two."""
    output: str
    errors: str
    object: JSON
    """As OpenAI shows it."""


class FileStore:
    """The store of a router. Any event loop may use it.

    Args:
        folder: is made, for this user alone, if it is not there.
        bounds: hold for each tenant. Batches that are kept count as files do.
        clock: Unix seconds.
    """

    def __init__(self, folder: str, bounds: Bounds, clock: Callable[[], float] = time.time) -> None:
        """Opens the store.

        Raises:
            StoreError: see `Database`.
        """
        self.bounds = bounds
        self._clock = clock
        self._database = Database(folder, FILE, _SCHEMA, VERSION)
        self._run = self._database.run
        self.contents = own_folder(self._database.folder / CONTENTS)

    def close(self) -> None:
        """Closes the store after the work that was begun."""
        self._database.close()

    # -- contents ------------------------------------------------------------------------------

    def begin(self) -> tuple[str, int]:
        """A new content: its name, and a descriptor to write it."""
        name = secrets.token_hex(16)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return name, os.open(self.contents / name, flags, 0o600)

    def drop(self, name: str) -> None:
        """Removes a content."""
        (self.contents / name).unlink(missing_ok=True)

    async def room(self, tenant: str, files: int = 0) -> int:
        """The bytes that the tenant may still keep. Results of batches may be more files than it
        may upload, so they are counted only if it brings `files` further ones.

        Raises:
            RouterError: STORE_FULL, those would be too many.
        """
        count, held = await self._run(self._database.held, "files", tenant)
        if files and count + files > self.bounds.most_number:
            raise store_full("files", self.bounds.most_number)
        return self.bounds.most_bytes - held

    # -- files ---------------------------------------------------------------------------------

    async def add(
        self, tenant: str, name: str, size: int, filename: str, purpose: str, lives_s: float
    ) -> JSON:
        """Gives a content to a tenant, and returns the file as OpenAI shows it.

        Raises:
            RouterError: STORE_FULL.
        """

        def add() -> JSON:
            with self._database.written() as database:
                self._check_room("files", tenant, size)
                return self._file(database, tenant, name, size, filename, purpose, lives_s)

        return await self._run(add)

    async def file(self, tenant: str, file_id: str) -> tuple[JSON, Path] | None:
        """A file of the tenant's, and where its content lies; None if there is none."""

        def get() -> tuple[JSON, Path] | None:
            query = "SELECT object, name FROM files WHERE id = ? AND tenant = ? AND expires_s > ?"
            given = (file_id, tenant, self._clock())
            row = self._database.connection.execute(query, given).fetchone()
            return None if row is None else (from_json(row[0]), self.contents / row[1])

        return await self._run(get)

    async def delete(self, tenant: str, file_id: str) -> bool:
        """Deletes a file of the tenant's; returns whether there was one.

        Raises:
            RouterError: INVALID_FIELD, a batch that has not ended reads it.
        """

        def delete() -> bool:
            with self._database.written() as database:
                query = f"SELECT 1 FROM batches WHERE input = ? AND tenant = ? AND {_OPEN}"
                if database.execute(query, (file_id, tenant)).fetchone():
                    raise wrong("file_id", "names the input of a batch that has not ended")
                query = "DELETE FROM files WHERE id = ? AND tenant = ? RETURNING name"
                row = database.execute(query, (file_id, tenant)).fetchone()
            if row is not None:
                self.drop(row[0])
            return row is not None

        return await self._run(delete)

    async def page(self, table: str, tenant: str, page: Page, purpose: str) -> list[JSON]:
        """Files or batches of a tenant, by age, behind the one that the page names: one more than
        it shows, if there are as many. That one may be deleted: whoever deletes all files reads
        the list behind what is gone.

        Raises:
            RouterError: INVALID_FIELD, there was no such one.
        """

        def get() -> list[JSON]:
            execute = self._database.connection.execute
            sign, order = (">", "ASC") if page.oldest_first else ("<", "DESC")
            query = f"SELECT object FROM {table} WHERE tenant = ?"
            given: list[object] = [tenant]
            if purpose:
                query, given = f"{query} AND purpose = ?", [*given, purpose]
            if page.after:
                made = f"SELECT created_s FROM {table} WHERE id = ? AND tenant = ?"
                row = execute(made, (page.after, tenant)).fetchone() or _made_s(page.after)
                query, given = (
                    f"{query} AND (created_s, id) {sign} (?, ?)",
                    [*given, row[0], page.after],
                )
            query += f" ORDER BY created_s {order}, id {order} LIMIT ?"
            rows = execute(query, (*given, page.limit + 1)).fetchall()
            return [from_json(row[0]) for row in rows]

        return await self._run(get)

    # -- batches -------------------------------------------------------------------------------

    async def add_batch(self, tenant: str, content: Path, stated: JSON, lives_s: float) -> JSON:
        """Begins a batch over the content of a file, which `stated` names.

        Raises:
            RouterError: STORE_FULL.
        """

        def add() -> JSON:
            now_s, batch_id = self._named("batch_")
            shown = {
                "id": batch_id,
                "object": "batch",
                **stated,
                **dict.fromkeys(("errors", "output_file_id", "error_file_id")),
                "status": "validating",
                "created_at": int(now_s),
                "expires_at": int(now_s + lives_s),
                **{f"{word}_at": None for word in ("in_progress", "finalizing", "cancelling")},
                **{f"{word}_at": None for word in ENDED},
                "request_counts": {"total": 0, "completed": 0, "failed": 0},
            }
            with self._database.written() as database:
                self._check_room("batches", tenant, 0)
                names = []
                for name, descriptor in (self.begin(), self.begin()):
                    os.close(descriptor)
                    names.append(name)
                row = (batch_id, tenant, 0, "validating", now_s, now_s + lives_s)
                row = (*row, stated["input_file_id"], content.name, *names, json_of(shown))
                database.execute(f"INSERT INTO batches VALUES (?{', ?' * 10})", row)
            return shown

        return await self._run(add)

    async def batch(self, batch_id: str, tenant: str | None = None) -> Batch | None:
        """A batch; of the tenant's, if one is named."""

        def get() -> Batch | None:
            found = self._batches("id = ? AND (? IS NULL OR tenant = ?)", batch_id, tenant, tenant)
            return next(found, None)

        return await self._run(get)

    async def open_batches(self) -> list[Batch]:
        """All that have not ended, the oldest first."""
        return await self._run(lambda: list(self._batches(f"{_OPEN} ORDER BY created_s")))

    async def change(
        self, batch_id: str, of: Collection[str] | None = None, **fields: object
    ) -> bool:
        """Sets fields of a batch that has not ended, and the time of a new status.

        Args:
            batch_id: the batch.
            of: its status must be one of these; None: any but the last ones.
            fields: as OpenAI shows them.

        Returns:
            Whether it was so.
        """

        def change() -> bool:
            with self._database.written() as database:
                batch = next(self._batches(f"id = ? AND {_OPEN}", batch_id), None)
                if batch is None or (of is not None and batch.status not in of):
                    return False
                self._put(database, batch, dict(fields))
                return True

        return await self._run(change)

    async def finish(self, batch: Batch, status: str, **fields: object) -> None:
        """Ends a batch. Its results become files of its tenant; an empty one goes."""

        def finish() -> None:
            unwanted, ids = [], dict(fields)
            with self._database.written() as database:
                now = next(self._batches(f"id = ? AND {_OPEN}", batch.id), None)
                if now is None:
                    return
                for word, name in (("output", batch.output), ("error", batch.errors)):
                    size = (self.contents / name).stat().st_size
                    if not size:
                        unwanted.append(name)
                        continue
                    named = f"{batch.id}_{word}.jsonl"
                    lives_s = self.bounds.most_days * DAY_S
                    given = (batch.tenant, name, size, named, "batch_output", lives_s)
                    ids[f"{word}_file_id"] = self._file(database, *given)["id"]
                self._put(database, now, {**ids, "status": status})
            for name in unwanted:
                self.drop(name)

        await self._run(finish)

    async def sweep(self) -> None:
        """Removes what is too old, and contents that a killed process left."""

        def sweep() -> None:
            now_s = self._clock()
            with self._database.written() as database:
                taken = f"SELECT content FROM batches WHERE {_OPEN}"
                query = f"DELETE FROM files WHERE expires_s < ? AND name NOT IN ({taken})"
                database.execute(query, (now_s,))
                oldest_s = now_s - self.bounds.most_days * DAY_S
                query = f"DELETE FROM batches WHERE created_s < ? AND NOT {_OPEN}"
                database.execute(query, (oldest_s,))
                query = (
                    "SELECT name FROM files UNION SELECT output FROM batches WHERE "
                    f"{_OPEN} UNION SELECT errors FROM batches WHERE {_OPEN}"
                )
                known = {row[0] for row in database.execute(query)}
            for path in self.contents.iterdir():
                if path.name not in known and path.lstat().st_mtime < now_s - DAY_S:
                    path.unlink(missing_ok=True)

        await self._run(sweep)

    # -- on the thread -------------------------------------------------------------------------

    def _named(self, prefix: str) -> tuple[float, str]:
        """The time, and an id that nobody can guess, though it begins with the time."""
        now_us = int(self._clock() * 1e6)
        return now_us / 1e6, f"{prefix}{now_us:014x}{secrets.token_hex(16)}"

    def _check_room(self, table: str, tenant: str, size: int) -> None:
        count, held = self._database.held(table, tenant)
        if count >= self.bounds.most_number:
            raise store_full(table, self.bounds.most_number)
        if held + size > self.bounds.most_bytes:
            raise store_full("bytes", self.bounds.most_bytes)

    def _file(
        self,
        database: sqlite3.Connection,
        tenant: str,
        name: str,
        size: int,
        filename: str,
        purpose: str,
        lives_s: float,
    ) -> JSON:
        now_s, file_id = self._named("file-")
        expires_s = now_s + min(lives_s, self.bounds.most_days * DAY_S)
        shown = {
            "id": file_id,
            "object": "file",
            "bytes": size,
            "created_at": int(now_s),
            "expires_at": int(expires_s),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        row = (file_id, tenant, size, name, purpose, now_s, expires_s, json_of(shown))
        database.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        return shown

    def _batches(self, where: str, *given: object) -> Iterator[Batch]:
        query = (
            f"SELECT id, tenant, status, content, output, errors, object FROM batches WHERE {where}"
        )
        for row in self._database.connection.execute(query, given).fetchall():
            yield Batch._make((*row[:-1], from_json(row[-1])))

    def _put(self, database: sqlite3.Connection, batch: Batch, fields: dict[str, object]) -> None:
        shown = {**batch.object, **fields}
        if shown["status"] != batch.status:
            shown[f"{shown['status']}_at"] = int(self._clock())
        query = "UPDATE batches SET status = ?, object = ? WHERE id = ?"
        database.execute(query, (shown["status"], json_of(shown), batch.id))


def _made_s(gone: str) -> tuple[float]:
    """When what had this id was made.

    Raises:
        RouterError: INVALID_FIELD, nothing had it.
    """
    if (found := _ID.fullmatch(gone)) is None:
        raise lost_place()
    return (int(found[1], 16) / 1e6,)
