"""Errors in the form of this HTTP API.

The statuses and reasons are those of the gRPC API, in another spelling. The headers say to clients
whether a retry can help, and when.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

from grpc import StatusCode

from router.errors import RouterError

JSON = dict[str, Any]

DROPPED: Final = "x-dropped-keywords"
"""Header that names the keywords of a schema that are not enforced."""
IGNORED: Final = "x-baton-ignored"
"""Header that names the fields of a request that have no effect."""
_MAX_HEADER_CHARS: Final = 2048
_MAX_NAME_CHARS: Final = 256
_MAX_NAMES: Final = 256
CLIENT_LEFT: Final = 499
"""Status in the log for a caller that left. It is never sent."""
_STATUSES: Final = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.CANCELLED: CLIENT_LEFT,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.ABORTED: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
    StatusCode.UNIMPLEMENTED: 415,
}
"""All others are 500."""
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_PARAMS: Final = (
    ("input.text", "prompt"),
    ("input.token_ids.ids", "prompt"),
    ("input.chat.messages", "messages"),
    ("input.chat.template_variables", "chat_template_kwargs"),
    ("input.chat.tool_choice.mode", "tool_choice"),
    ("input.chat.continue_last", "continue_final_message"),
    ("input.chat.", ""),
    ("input.chat", "messages"),
    ("input.structure", "response_format"),
    ("input.sampling.", ""),
    ("input.stop.sequences", "stop"),
    ("input.stop.token_ids", "stop_token_ids"),
    ("input.stop.", ""),
    ("input.output.", ""),
    ("input.choices", "n"),
    ("input.beams.width", "n"),
    ("input.beams.", ""),
    ("input.beams", "use_beam_search"),
    ("input.", ""),
    ("input", "prompt"),
    ("text", "prompt"),
    ("chat.messages", "messages"),
    ("chat.template_variables", "chat_template_kwargs"),
    ("chat.continue_last", "continue_final_message"),
    ("chat.", ""),
    ("chat", "messages"),
)
"""Prefixes of paths in `inference.proto` and their names in this API. The first match counts."""
_OF_FUNCTION: Final = re.compile(
    r"^(tools\[\d+\]|tool_choice)(?=\.(?:name|description|parameters)\b)"
)
"""A path that lies one level deeper in this API."""


def http_status(error: RouterError) -> int:
    """The status code of an error."""
    return _STATUSES.get(error.code, 500)


def chat_name(path: str) -> str:
    """The name of a field of `inference.proto` in chats and completions."""
    return _OF_FUNCTION.sub(r"\1.function", name_by(_PARAMS, path))


def error_body(
    error: RouterError, trace_id: str = "", name_of: Callable[[str], str] = chat_name
) -> JSON:
    """The body of an error; `name_of` gives its fields their names in the API."""
    status, params = http_status(error), [name_of(one.field) for one in error.violations]
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = message_of(error, trace_id, name_of)
    return body(message, _TYPES.get(status, kind), params[0] if params else None, error.reason)


def message_of(error: RouterError, trace_id: str, name_of: Callable[[str], str]) -> str:
    """The text of an error, with every violation."""
    message = error.message
    if error.reason == "INVALID_FIELD":
        message = "; ".join(f"{name_of(one.field)}: {one.description}" for one in error.violations)
    if http_status(error) >= 500 and trace_id:
        message = f"{message} (trace {trace_id})"
    return message


def body(message: str, kind: str, param: str | None, reason: str) -> JSON:
    """The body of an error, from its parts."""
    error = {"message": message, "type": kind, "param": param, "code": reason.lower()}
    return {"error": error}


def retry_headers(error: RouterError) -> dict[str, str]:
    """Headers that say when to retry, or not to retry. Without them OpenAI's clients retry after
    every 5xx."""
    if error.retry_after_s is None:
        taken = {"accept-encoding": "identity"} if http_status(error) == 415 else {}
        return {"x-should-retry": "false", **taken}
    return {
        "retry-after": str(max(1, math.ceil(error.retry_after_s))),
        "retry-after-ms": str(math.ceil(error.retry_after_s * 1e3)),
        "x-should-retry": "true",
    }


def dropped_header(pointers: Sequence[str]) -> dict[str, str]:
    """The header for keywords that are not enforced; it names as many as it holds."""
    return _naming(DROPPED, pointers)


def ignored_header(fields: Sequence[str]) -> dict[str, str]:
    """The header for fields that have no effect; it names as many as it holds."""
    return _naming(IGNORED, fields)


def _naming(header: str, names: Sequence[str]) -> dict[str, str]:
    shown = list(dict.fromkeys(names))[:_MAX_NAMES]
    value = ", ".join(quote(name[:_MAX_NAME_CHARS], safe="/~$[]") for name in shown)
    if len(value) > _MAX_HEADER_CHARS:
        value = value[: value.rindex(", ", 0, _MAX_HEADER_CHARS)] + ", ..."
    return {header: value} if value else {}


def name_by(names: Sequence[tuple[str, str]], path: str) -> str:
    """A path with the first of the beginnings that fits replaced by its name."""
    for beginning, name in names:
        rest = path.removeprefix(beginning)
        if path.startswith(beginning) and (beginning[-1] == "." or rest[:1] in ("", ".", "[")):
            return name + rest
    return path
