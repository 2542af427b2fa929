"""How an API writes its errors, frames the events of its streams and takes a caller's token.

`Dialect` is that of chats and completions. The APIs that do it otherwise override it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from router.doors.auth import AUTHORIZATION
from router.doors.http.statuses import JSON, error_body
from router.one_line import json_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.errors import RouterError


class Dialect:
    """The dialect of chats and completions."""

    last: bytes = b"data: [DONE]\n\n"
    """Ends a complete stream."""

    def event(self, content: JSON) -> bytes:
        """An event of a stream."""
        return b"data: %b\n\n" % json_line(content)

    def error(self, error: RouterError, trace_id: str = "") -> JSON:
        """An error, as a body and as the last event of a stream."""
        return error_body(error, trace_id)

    def headers(self, trace_id: str) -> dict[str, str]:
        """Further headers of every answer."""
        return {}

    def authorization(self, headers: Mapping[str, str]) -> str | None:
        """The caller's token, as the header `Authorization` holds it."""
        return headers.get(AUTHORIZATION)


class OwnNames(Dialect):
    """The dialect of methods whose errors name the API's fields already."""

    def error(self, error: RouterError, trace_id: str = "") -> JSON:
        """An error whose fields have the API's names already."""
        return error_body(error, trace_id, str)


class NamedEvents(OwnNames):
    """Events with their `type` as name. The last one is an event like the others."""

    last = b""

    def event(self, content: JSON) -> bytes:
        """An event of a stream."""
        return b"event: %b\n" % content["type"].encode() + super().event(content)


CHATS: Final = Dialect()
OWN_NAMES: Final = OwnNames()
NAMED_EVENTS: Final = NamedEvents()
