"""Errors and headers in Anthropic's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from router.doors.http.dialect import NamedEvents
from router.doors.http.statuses import JSON, http_status, message_of

if TYPE_CHECKING:
    from router.errors import RouterError

VERSION_HEADER: Final = "anthropic-version"
"""Header that Anthropic's clients send with every request."""
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesDialect(NamedEvents):
    """The dialect of /v1/messages."""

    def error(self, error: RouterError, trace_id: str = "") -> JSON:
        """An error whose fields have the API's names already."""
        return self.body(http_status(error), message_of(error, trace_id, str), trace_id)

    def body(self, status: int, message: str, trace_id: str) -> JSON:
        """The body of an error, from its parts."""
        others = "invalid_request_error" if status < 500 else "api_error"
        described = {"type": _TYPES.get(status, others), "message": message}
        return {"type": "error", "error": described, "request_id": trace_id or None}

    def headers(self, trace_id: str) -> dict[str, str]:
        """The trace id under the name that Anthropic's clients read."""
        return {"request-id": trace_id}

    def authorization(self, headers: Mapping[str, str]) -> str | None:
        """The caller's token: of `x-api-key`, where there is no `Authorization`."""
        key = headers.get("x-api-key")
        return super().authorization(headers) or (key and f"Bearer {key}")


MESSAGES_DIALECT: Final = MessagesDialect()
