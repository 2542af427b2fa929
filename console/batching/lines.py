"""Lines of a batch: requests in OpenAI's batch format, and their results.

A request is `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`, one a line. Its
result is a line with the same custom_id, in any order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from console.loadgen.errors import BenchError

URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MOST_LINE_BYTES: Final = 32 << 20
"""Bytes of a line: several times the largest request that a router takes."""
MOST_ID_CHARS: Final = 512
"""Characters of a custom_id. They are kept in memory, to find two that are equal."""


class BatchError(BenchError):
    """A batch cannot be run, or not to its end; the message says why."""


@dataclass(frozen=True, slots=True)
class Line:
    """A request, or what is wrong with its line."""

    number: int
    """From 1 on."""
    custom_id: str
    url: str = ""
    body: dict[str, Any] | None = None
    wrong: str = ""
    """The rule that the line breaks; empty: none."""

    @property
    def id(self) -> str:
        """Names the line in its result, whatever its custom_id is."""
        return f"batch_req_{self.number}"


def read_lines(path: Path) -> Iterator[Line]:
    """The requests of a file, one at a time. Empty lines are none.

    Raises:
        OSError: the file cannot be read.
    """
    seen: set[str] = set()
    with path.open("rb") as file:
        number = 0
        while data := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(data) > MOST_LINE_BYTES:
                while data and not data.endswith(b"\n"):
                    data = file.readline(MOST_LINE_BYTES)
                yield Line(number, "", wrong=f"a line has at most {MOST_LINE_BYTES} bytes")
            elif data.strip():
                yield _line(number, data, seen)


def _line(number: int, data: bytes, seen: set[str]) -> Line:
    try:
        stated = json.loads(data)
    except (ValueError, RecursionError):
        return Line(number, "", wrong="the line is no JSON")
    if not isinstance(stated, dict):
        return Line(number, "", wrong="the line is no object")
    custom_id, url, body = stated.get("custom_id"), stated.get("url"), stated.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MOST_ID_CHARS:
        return Line(number, "", wrong=f"custom_id: must be a text of 1 to {MOST_ID_CHARS}")
    rules = (
        (custom_id not in seen, "custom_id: an earlier line has the same"),
        (stated.get("method") == "POST", "method: must be POST"),
        (url in URLS, f"url: must be one of {', '.join(URLS)}"),
        (isinstance(body, dict), "body: must be an object"),
        (isinstance(body, dict) and not body.get("stream"), "body.stream: a batch has no streams"),
    )
    seen.add(custom_id)
    if wrong := next((rule for holds, rule in rules if not holds), ""):
        return Line(number, custom_id, wrong=wrong)
    return Line(number, custom_id, str(url), body)


def answered(line: Line, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """The result of a request that got an answer, which may be an error."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


def refused(line: Line) -> dict[str, Any]:
    """The result of a line that is no request."""
    error = {"code": "invalid_line", "message": line.wrong, "line": line.number}
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}
