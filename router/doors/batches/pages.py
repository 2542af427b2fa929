"""Files and batches over HTTP, as OpenAI has them. Another tenant's are not there."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from router.doors.auth import AUTHORIZATION, Gate
from router.doors.batches import refusals
from router.doors.batches.multipart import Upload
from router.doors.batches.refusals import wrong
from router.doors.batches.store import ENDED
from router.doors.database import DAY_S
from router.doors.http.bodies import paced
from router.doors.http.connections import connection_of
from router.doors.http.origins import refuse_foreign
from router.doors.http.parsing import Body, parse
from router.doors.http.said import Said
from router.doors.http.values import Metadata, Unless
from router.doors.paging import MOST_LISTED, is_number, page_of
from router.one_line import json_of
from router.requests.bounds import MOST_FILE_BYTES, body_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

    from router.call import Call
    from router.doors.batches.store import Batch, FileStore
    from router.doors.http.statuses import JSON

FILES: Final = "/v1/files"
BATCHES: Final = "/v1/batches"
WINDOW_S: Final = DAY_S
"""Time in which a batch must end: 24 h, the only one that OpenAI has."""
MOST_FORM_BYTES: Final = 128 << 10
"""Bytes of a form beside its file: more than its parts may have."""
MOST_NAME_CHARS: Final = 255
"""Characters of a file's name."""

Word = Annotated[str, Field(max_length=64)]


class BatchRequest(Body):
    """The body of /v1/batches."""

    input_file_id: Word
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: Annotated[Any, Unless()] = None


class FilePages:
    """The pages of a store, and the method that begins a batch.

    Args:
        store: the store; None: nothing is kept.
        gate: admits callers.
        origins: of web pages that may call.
        begun: is called when there is a new batch, or one to cancel.
    """

    def __init__(
        self,
        store: FileStore | None,
        gate: Gate,
        origins: Sequence[str],
        begun: Callable[[], None],
    ) -> None:
        self._held = store
        self._gate = gate
        self._origins = origins
        self._begun = begun
        self._arriving: dict[str, int] = {}
        """Bytes of each tenant's uploads under way."""

    def routes(self) -> list[Route]:
        """All but the one that begins a batch."""
        file, batch = f"{FILES}/{{file_id}}", f"{BATCHES}/{{batch_id}}"
        return [
            Route(FILES, self._upload, methods=["POST"]),
            Route(FILES, self._list_files, methods=["GET"]),
            Route(file, self._read_file, methods=["GET"]),
            Route(file, self._delete_file, methods=["DELETE"]),
            Route(f"{file}/content", self._content, methods=["GET"]),
            Route(BATCHES, self._list_batches, methods=["GET"]),
            Route(batch, self._read_batch, methods=["GET"]),
            Route(f"{batch}/cancel", self._cancel, methods=["POST"]),
        ]

    async def begin(self, body: bytes, call: Call, _: str) -> Said:
        """Begins a batch.

        Raises:
            RouterError: the request cannot be understood; FILE_NOT_FOUND; STORE_FULL.
        """
        asked = parse(BatchRequest, body)
        found = await self._store.file(call.tenant, asked.input_file_id)
        if found is None:
            raise refusals.file_not_found()
        if found[0]["purpose"] != "batch":
            raise wrong("input_file_id", "names a file of another purpose than batch")
        stated = {
            "endpoint": asked.endpoint,
            "input_file_id": asked.input_file_id,
            "completion_window": asked.completion_window,
            "metadata": asked.metadata,
        }
        shown = await self._store.add_batch(call.tenant, found[1], stated, WINDOW_S)
        self._begun()
        return Said(shown, asked.ignored())

    # -- files ---------------------------------------------------------------------------------

    async def _upload(self, request: Request) -> Response:
        refuse_foreign(request, self._origins)
        tenant = self._admit(request)
        store = self._store
        whole = await store.room(tenant, files=1)
        room = min(whole, MOST_FILE_BYTES)
        said = request.headers.get("content-length", "")
        if said.isdecimal() and int(said) > room + MOST_FORM_BYTES:
            raise self._too_large(room)
        try:
            content = await asyncio.to_thread(_Content, store)
            try:
                upload = await self._receive(request, tenant, content, whole)
                filename, lives_s = _checked(upload)
                given = content.name, content.size, filename, "batch", lives_s
                shown = await store.add(tenant, *given)
                content.kept = True
            finally:  # Also where this request is cancelled once more.
                await asyncio.shield(asyncio.to_thread(content.end))
        except (OSError, sqlite3.Error):
            raise refusals.store_full("bytes", store.bounds.most_bytes) from None
        return _json(shown)

    async def _receive(
        self, request: Request, tenant: str, content: _Content, whole: int
    ) -> Upload:
        """Reads the form, and writes its file, for which and all others under way the tenant has
        `whole` bytes."""
        came_bytes = 0
        room = min(whole, MOST_FILE_BYTES)
        upload = Upload(request.headers.get("content-type", ""), content.write)
        try:
            async with paced() as came:
                async for part in request.stream():
                    came(len(part))
                    came_bytes += len(part)
                    self._arriving[tenant] = self._arriving.get(tenant, 0) + len(part)
                    if came_bytes > room + MOST_FORM_BYTES:
                        raise self._too_large(room)
                    if self._arriving[tenant] > whole + MOST_FORM_BYTES:
                        raise refusals.store_full("bytes", self._store.bounds.most_bytes)
                    await asyncio.to_thread(upload.feed, part)
        except ClientDisconnect:
            raise refusals.wrong("file", "did not come whole") from None
        finally:
            if left := self._arriving.pop(tenant, 0) - came_bytes:
                self._arriving[tenant] = left
        upload.close()
        if content.size > room:
            raise self._too_large(room)
        return upload

    def _too_large(self, room: int) -> Exception:
        if room == MOST_FILE_BYTES:
            return wrong("file", f"must have at most {MOST_FILE_BYTES} bytes")
        return refusals.store_full("bytes", self._store.bounds.most_bytes)

    async def _list_files(self, request: Request) -> Response:
        return await self._list("files", request)

    async def _read_file(self, request: Request) -> Response:
        return _json((await self._file(request))[0])

    async def _delete_file(self, request: Request) -> Response:
        tenant, file_id = self._admit(request), request.path_params["file_id"]
        if not await self._store.delete(tenant, file_id):
            raise refusals.file_not_found()
        return _json({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, request: Request) -> Response:
        _, path = await self._file(request)
        try:
            held = path.lstat()
        except FileNotFoundError:
            raise refusals.file_not_found() from None
        if not stat.S_ISREG(held.st_mode):
            raise refusals.file_not_found()
        return _Download(path, media_type="application/octet-stream", stat_result=held)

    # -- batches -------------------------------------------------------------------------------

    async def _list_batches(self, request: Request) -> Response:
        return await self._list("batches", request)

    async def _read_batch(self, request: Request) -> Response:
        return _json((await self._batch(request)).object)

    async def _cancel(self, request: Request) -> Response:
        batch = await self._batch(request)
        open_to = ("validating", "in_progress")
        if batch.status in ENDED or (
            batch.status in open_to
            and not await self._store.change(batch.id, open_to, status="cancelling")
        ):
            raise wrong("batch_id", "names a batch that has ended")
        self._begun()
        return _json((await self._batch(request)).object)

    # -- both ----------------------------------------------------------------------------------

    @property
    def _store(self) -> FileStore:
        if self._held is None:
            raise refusals.not_kept()
        return self._held

    def _admit(self, request: Request) -> str:
        """The caller's tenant."""
        return self._gate.caller_of(request.headers.get(AUTHORIZATION)).tenant

    async def _file(self, request: Request) -> tuple[JSON, Path]:
        tenant = self._admit(request)
        found = await self._store.file(tenant, request.path_params["file_id"])
        if found is None:
            raise refusals.file_not_found()
        return found

    async def _batch(self, request: Request) -> Batch:
        tenant = self._admit(request)
        found = await self._store.batch(request.path_params["batch_id"], tenant)
        if found is None:
            raise refusals.batch_not_found()
        return found

    async def _list(self, table: str, request: Request) -> Response:
        """A page, the latest first, unless `order` is `asc`."""
        tenant, asked = self._admit(request), request.query_params
        page = page_of(asked, MOST_LISTED, most=10_000)
        purpose = asked.get("purpose", "") if table == "files" else ""
        return _json(page.shown(await self._store.page(table, tenant, page, purpose)))


class _Download(FileResponse):
    """A file's content. A client that stops reading it loses its connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it, each part at the slowest pace of a body at least."""
        loop, abort = asyncio.get_running_loop(), connection_of(scope).abort

        async def paced_send(message: Message) -> None:
            timer = loop.call_later(body_s(len(message.get("body", b""))), abort)
            try:
                await send(message)
            finally:
                timer.cancel()

        await super().__call__(scope, receive, paced_send)


class _Content:
    """A new content of a store. Threads write it, of which a cancelled request may leave one
    behind: then the content is closed, and its number may be another file's."""

    def __init__(self, store: FileStore) -> None:
        """Opens it.

        Raises:
            OSError: there is no room.
        """
        self._store = store
        self._lock = threading.Lock()
        self.name, self._file = store.begin()
        self.size = 0
        self.kept = False
        """Whether it belongs to somebody. Otherwise it goes."""

    def write(self, data: bytes) -> None:
        """Appends bytes.

        Raises:
            OSError: the disk is full.
        """
        with self._lock:
            view = memoryview(data)
            while view and self._file >= 0:
                view = view[os.write(self._file, view) :]
            self.size += len(data)

    def end(self) -> None:
        """Closes it."""
        with self._lock:
            file, self._file = self._file, -1
            os.close(file)
        if not self.kept:
            self._store.drop(self.name)


def _checked(upload: Upload) -> tuple[str, float]:
    """The file's name, and how long it lives, seconds.

    Raises:
        RouterError: INVALID_FIELD.
    """
    if upload.filename is None:
        raise wrong("file", "must be given, as a part of the form with a filename")
    if len(upload.filename) > MOST_NAME_CHARS:
        raise wrong("file", f"has a name of more than {MOST_NAME_CHARS} characters")
    if upload.fields.get("purpose") != "batch":
        raise wrong("purpose", "must be batch: this router keeps files for batches alone")
    if upload.fields.get("expires_after[anchor]", "created_at") != "created_at":
        raise wrong("expires_after.anchor", "must be created_at")
    lives = upload.fields.get("expires_after[seconds]", "")
    if lives and not is_number(lives, 3600, 2_592_000):
        raise wrong("expires_after.seconds", "must be in [3600, 2592000]")
    return upload.filename, float(lives or "inf")


def _json(content: JSON) -> Response:
    return Response(json_of(content), media_type="application/json")
