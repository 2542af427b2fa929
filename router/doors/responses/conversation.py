"""The items that a request stands on: those of earlier responses, and its own."""

from __future__ import annotations

import logging
import sqlite3
from typing import TYPE_CHECKING

from router import errors
from router.doors.responses.items import REFERENCE, Item, Turns
from router.doors.responses.refusals import (
    PREVIOUS,
    not_kept,
    previous_response_not_found,
    too_long,
)
from router.doors.responses.store import Kept, TooLongError
from router.doors.responses.writer import Keep, new_id
from router.errors import Violation

if TYPE_CHECKING:
    from router.doors.http.statuses import JSON
    from router.doors.responses.schema import ResponseRequest
    from router.doors.responses.store import ResponseStore

logger = logging.getLogger(__name__)


class Conversations:
    """Finds conversations, and keeps them.

    Args:
        store: None: nothing is kept.
    """

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    async def turns(self, request: ResponseRequest, tenant: str, most_bytes: int) -> Turns:
        """The turns of a request, with its references resolved.

        Raises:
            RouterError: PREVIOUS_RESPONSE_NOT_FOUND, or INVALID_FIELD.
        """
        if self._store is None and request.store:
            raise not_kept("store")
        turns = Turns()
        if request.instructions:
            system = {"role": "system", "content": request.instructions}
            turns.add(Item.model_validate(system), "instructions")
        for item in await self._earlier(request.previous_response_id, tenant, most_bytes):
            turns.add(Item.model_validate(item), PREVIOUS)
        await self._resolve(request.items, tenant, most_bytes)
        for index, one in enumerate(request.items):
            turns.add(one, f"input[{index}]")
        return turns

    def keep(self, request: ResponseRequest, tenant: str) -> Keep | None:
        """What stores the response to a request; None if it is not stored. Like OpenAI's, a store
        keeps what it is not told to leave."""
        if (store := self._store) is None or request.store is False:
            return None

        async def keep(response: JSON) -> bool:
            kept: dict[str, JSON] = {}
            for item in request.items:
                own = new_id("item")  # Pages begin behind an id, so it names one item.
                item_id = own if item.id is None or item.id in kept else item.id
                kept[item_id] = {**item.model_dump(exclude_none=True), "id": item_id}
            try:
                await store.put(
                    tenant, Kept(request.previous_response_id, list(kept.values()), response)
                )
            except sqlite3.Error as error:
                name = getattr(error, "sqlite_errorname", type(error).__name__)
                logger.error("a response could not be stored: %s", name)
                return False
            return True

        return keep

    async def _earlier(self, last: str | None, tenant: str, most_bytes: int) -> list[JSON]:
        if last is None:
            return []
        if self._store is None:
            raise not_kept(PREVIOUS)
        try:
            chain = await self._store.chain(tenant, last, most_bytes)
        except TooLongError:
            raise too_long(PREVIOUS) from None
        if chain is None:
            raise previous_response_not_found()
        return [item for kept in chain for item in (*kept.input, *kept.response["output"])]

    async def _resolve(self, items: list[Item], tenant: str, most_bytes: int) -> None:
        """Replaces references to stored items by these."""
        places = [index for index, item in enumerate(items) if item.type == REFERENCE]
        if not places:
            return
        field = f"input[{places[0]}]"
        if self._store is None:
            raise not_kept(field)
        ids = [items[index].id or "" for index in places]
        try:
            found = await self._store.items(tenant, ids, most_bytes)
        except TooLongError:
            raise too_long(field) from None
        lost = [index for index in places if (items[index].id or "") not in found]
        if lost:
            rule = "names no item of a response that is stored"
            raise errors.invalid_fields([Violation(f"input[{one}].id", rule) for one in lost])
        for index in places:
            items[index] = Item.model_validate(found[items[index].id or ""])
