"""Responses on the disk.

A row holds the items of one request and the response to it. A conversation is a chain of rows, each
of which names the one before, so no item is stored twice.

Bounds hold for each tenant: bytes, number of responses, and age since the last use. The responses
used longest ago go first. Using the end of a chain uses all of it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pydantic_core import from_json

from router.doors.database import DAY_S, Bounds, Database
from router.one_line import json_of
from router.requests.bounds import MAX_TURNS

if TYPE_CHECKING:
    from router.doors.http.statuses import JSON

FILE: Final = "responses.sqlite"
VERSION: Final = 1
"""Number of the tables' form. A release that raises it reads, or refuses, the ones before."""
_SCHEMA: Final = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, used_s REAL NOT NULL,
    bytes INTEGER NOT NULL, items INTEGER NOT NULL, input BLOB NOT NULL, response BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX used ON responses (tenant, used_s, bytes);
CREATE INDEX age ON responses (used_s);
CREATE TABLE items (
    id TEXT PRIMARY KEY, response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX items_of ON items (response);
"""
_CHAIN: Final = """
WITH RECURSIVE chain (id, previous, bytes, items, place) AS (
    SELECT id, previous, bytes, items, 0 FROM responses WHERE id = :id AND tenant = :tenant
    UNION ALL
    SELECT one.id, one.previous, one.bytes, one.items, chain.place + 1
    FROM responses AS one JOIN chain ON one.id = chain.previous
    WHERE one.tenant = :tenant AND chain.place < :most
)
SELECT id, previous, bytes, items FROM chain ORDER BY place
"""


class TooLongError(Exception):
    """A chain holds more than a request may."""


class Kept(NamedTuple):
    """One response and what it answers."""

    previous: str | None
    input: list[JSON]
    response: JSON


class ResponseStore:
    """The store of a router. Any event loop may use it.

    Args:
        folder: is made, for this user alone, if it is not there.
        bounds: hold for each tenant.
        clock: Unix seconds.
    """

    def __init__(self, folder: str, bounds: Bounds, clock: Callable[[], float] = time.time) -> None:
        """Opens the store.

        Raises:
            StoreError: the folder is a link, others may read it, or its file cannot be used.
        """
        self._bounds = bounds
        self._clock = clock
        self._database = Database(folder, FILE, _SCHEMA, VERSION)
        self._run = self._database.run

    def close(self) -> None:
        """Closes the file after the work that was begun."""
        self._database.close()

    async def put(self, tenant: str, kept: Kept) -> None:
        """Stores a response, and drops what the tenant's bounds leave no room for.

        Raises:
            sqlite3.Error: the disk is full, say.
        """
        await self._run(self._put, tenant, kept)

    async def get(self, tenant: str, response_id: str) -> Kept | None:
        """A response of the tenant's; None if there is none."""
        return await self._run(self._get, tenant, response_id)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Deletes a response of the tenant's; returns whether there was one."""
        return await self._run(self._delete, tenant, response_id)

    async def chain(self, tenant: str, last: str, most_bytes: int) -> list[Kept] | None:
        """A response with all before it, the first one first; None if one of them is not there.

        Raises:
            TooLongError: they have more than `most_bytes`, or more items than a request may.
        """
        return await self._run(self._chain, tenant, last, most_bytes)

    async def items(self, tenant: str, ids: Sequence[str], most_bytes: int) -> dict[str, JSON]:
        """Returns the items with these ids that are in responses of the tenant's, by id.

        Raises:
            TooLongError: the responses have more than `most_bytes`.
        """
        return await self._run(self._items, tenant, ids, most_bytes)

    def _put(self, tenant: str, kept: Kept) -> None:
        asked, answer = json_of(kept.input), json_of(kept.response)
        items: Sequence[JSON] = kept.response["output"]
        response_id, size = kept.response["id"], len(asked) + len(answer)
        row = (
            *(response_id, tenant, kept.previous, self._clock()),
            *(size, len(kept.input) + len(items), asked, answer),
        )
        with self._database.written() as database:
            self._make_room(database, tenant, size)
            database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            database.executemany(
                "INSERT INTO items VALUES (?, ?)", [(one["id"], response_id) for one in items]
            )

    def _make_room(self, database: sqlite3.Connection, tenant: str, size: int) -> None:
        oldest_s = self._clock() - self._bounds.most_days * DAY_S
        database.execute("DELETE FROM responses WHERE used_s < ?", (oldest_s,))
        count, held = self._database.held("responses", tenant)
        query = "SELECT id, bytes FROM responses WHERE tenant = ? ORDER BY used_s, id"
        old = database.execute(query, (tenant,))
        while count >= self._bounds.most_number or held + size > self._bounds.most_bytes:
            if (row := old.fetchone()) is None:
                break
            database.execute("DELETE FROM responses WHERE id = ?", (row[0],))
            count, held = count - 1, held - row[1]
        old.close()

    def _get(self, tenant: str, response_id: str) -> Kept | None:
        oldest_s = self._clock() - self._bounds.most_days * DAY_S
        query = (
            "SELECT previous, input, response FROM responses "
            "WHERE id = ? AND tenant = ? AND used_s >= ?"
        )
        row = self._database.connection.execute(query, (response_id, tenant, oldest_s)).fetchone()
        return None if row is None else Kept(row[0], from_json(row[1]), from_json(row[2]))

    def _delete(self, tenant: str, response_id: str) -> bool:
        query = "DELETE FROM responses WHERE id = ? AND tenant = ?"
        with self._database.written() as database:
            return database.execute(query, (response_id, tenant)).rowcount > 0

    def _chain(self, tenant: str, last: str, most_bytes: int) -> list[Kept] | None:
        named = {"id": last, "tenant": tenant, "most": MAX_TURNS}
        rows = self._database.connection.execute(_CHAIN, named).fetchall()
        if not rows or (rows[-1][1] is not None and len(rows) <= MAX_TURNS):
            return None
        if sum(row[2] for row in rows) > most_bytes or sum(row[3] for row in rows) > MAX_TURNS:
            raise TooLongError
        found = [self._get(tenant, row[0]) for row in reversed(rows)]
        whole = [kept for kept in found if kept is not None]
        if len(whole) < len(rows):
            return None
        now_s = self._clock()
        with self._database.written() as database:
            database.executemany(
                "UPDATE responses SET used_s = ? WHERE id = ?", [(now_s, row[0]) for row in rows]
            )
        return whole

    def _items(self, tenant: str, ids: Sequence[str], most_bytes: int) -> dict[str, JSON]:
        query = (
            "SELECT responses.id, bytes FROM items JOIN responses ON responses.id = items.response "
            "WHERE items.id = ? AND tenant = ?"
        )
        sizes: dict[str, int] = {}
        for one in ids:
            for response_id, size in self._database.connection.execute(query, (one, tenant)):
                most_bytes -= 0 if response_id in sizes else size
                sizes[response_id] = size
            if most_bytes < 0:
                raise TooLongError
        held = (self._get(tenant, response_id) for response_id in sizes)
        outputs = (kept.response["output"] for kept in held if kept is not None)
        return {item["id"]: item for output in outputs for item in output}
