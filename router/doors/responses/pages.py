"""Stored responses: read, listed, deleted. Another tenant's are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from router import errors
from router.doors.auth import AUTHORIZATION, Gate
from router.doors.paging import lost_place, page_of
from router.doors.responses.refusals import response_not_found
from router.errors import Violation
from router.one_line import json_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from router.doors.http.statuses import JSON
    from router.doors.responses.store import Kept, ResponseStore


class ResponsePages:
    """The pages of one store."""

    def __init__(self, store: ResponseStore | None, gate: Gate) -> None:
        self._store = store
        self._gate = gate

    def routes(self, path: str) -> list[Route]:
        """The routes below `path`."""
        one = f"{path}/{{response_id}}"
        return [
            Route(one, self._read, methods=["GET"]),
            Route(one, self._delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self._cancel, methods=["POST"]),
            Route(f"{one}/input_items", self._list, methods=["GET"]),
        ]

    async def _read(self, request: Request) -> Response:
        kept = await self._find(request)
        if request.query_params.get("stream", "false") != "false":
            rule = "is not supported: a stored response is complete"
            raise errors.invalid_fields([Violation("stream", rule)])
        return _json(kept.response)

    async def _delete(self, request: Request) -> Response:
        tenant, response_id = self._admit(request)
        if self._store is None or not await self._store.delete(tenant, response_id):
            raise response_not_found()
        return _json({"id": response_id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        await self._find(request)
        rule = "names a complete response: only background ones can be cancelled"
        raise errors.invalid_fields([Violation("response_id", rule)])

    async def _list(self, request: Request) -> Response:
        """The items of the request. The latest come first, unless `order` is `asc`."""
        items = (await self._find(request)).input
        page = page_of(request.query_params, usual=20)
        if not page.oldest_first:
            items = items[::-1]
        if page.after:
            places = (place for place, item in enumerate(items) if item["id"] == page.after)
            if (place := next(places, None)) is None:
                raise lost_place()
            items = items[place + 1 :]
        return _json(page.shown(items))

    def _admit(self, request: Request) -> tuple[str, str]:
        """The caller's tenant, and the id in the path."""
        caller = self._gate.caller_of(request.headers.get(AUTHORIZATION))
        return caller.tenant, request.path_params["response_id"]

    async def _find(self, request: Request) -> Kept:
        tenant, response_id = self._admit(request)
        kept = None if self._store is None else await self._store.get(tenant, response_id)
        if kept is None:
            raise response_not_found()
        return kept


def _json(content: JSON) -> Response:
    return Response(json_of(content), media_type="application/json")
