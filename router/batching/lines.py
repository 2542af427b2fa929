"""Lines of a batch: requests in OpenAI's batch format, and their results.

A request is `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`, one a line. Its
result is a line with the same custom_id, in any order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

URLS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MOST_LINE_BYTES: Final = 32 << 20
"""Bytes of a line: several times the largest request that a router takes."""
MOST_ID_CHARS: Final = 512
"""Characters of a custom_id. Those of results are kept in memory, as long as a batch runs."""


class BatchError(Exception):
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
    size: int = 0
    """Bytes in the file."""

    @property
    def id(self) -> str:
        """Names the line in its result, whatever its custom_id is."""
        return f"batch_req_{self.number}"


def read_lines(
    path: Path,
    urls: Sequence[str] = URLS,
    most_bytes: int = MOST_LINE_BYTES,
    wrong: Callable[[bytes], str] = lambda _: "",
) -> Iterator[Line]:
    """The requests of a file, one at a time. Empty lines are none.

    Args:
        path: the file.
        urls: those that a line may name.
        most_bytes: of a line.
        wrong: the rule that a line's bytes break, before they are parsed; empty: none.

    Raises:
        OSError: the file cannot be read.
    """
    seen: set[bytes] = set()
    with path.open("rb") as file:
        number = 0
        while data := file.readline(most_bytes + 1):
            number += 1
            if len(data) > most_bytes:
                while data and not data.endswith(b"\n"):
                    data = file.readline(most_bytes)
                yield Line(number, "", wrong=f"a line has at most {most_bytes} bytes")
            elif not data.isspace():
                rule = wrong(data)
                yield Line(number, "", wrong=rule) if rule else _line(number, data, seen, urls)


def _line(number: int, data: bytes, seen: set[bytes], urls: Sequence[str]) -> Line:
    try:
        stated = json.loads(data)
    except (ValueError, RecursionError):
        return Line(number, "", wrong="the line is no JSON")
    if not isinstance(stated, dict):
        return Line(number, "", wrong="the line is no object")
    custom_id, url, body = stated.get("custom_id"), stated.get("url"), stated.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MOST_ID_CHARS:
        return Line(number, "", wrong=f"custom_id: must be a text of 1 to {MOST_ID_CHARS}")
    digest = hashlib.sha256(custom_id.encode(errors="surrogatepass")).digest()[:16]
    rules = (
        (digest not in seen, "custom_id: an earlier line has the same"),
        (stated.get("method") == "POST", "method: must be POST"),
        (url in urls, f"url: must be {' or '.join(urls)}"),
        (isinstance(body, dict), "body: must be an object"),
        (isinstance(body, dict) and not body.get("stream"), "body.stream: a batch has no streams"),
    )
    seen.add(digest)
    if wrong := next((rule for holds, rule in rules if not holds), ""):
        return Line(number, custom_id, wrong=wrong)
    return Line(number, custom_id, str(url), body, size=len(data))


def went_well(result: Mapping[str, Any]) -> bool:
    """Whether a result is an answer that is no error."""
    response = result.get("response")
    return response is not None and response["status_code"] < 400


def answered(line: Line, status: int, request_id: str, body: Any) -> dict[str, Any]:
    """The result of a request that got an answer, which may be an error."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


def refused(line: Line) -> dict[str, Any]:
    """The result of a line that is no request."""
    error = {"code": "invalid_line", "message": line.wrong, "line": line.number}
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}


def expired(line: Line) -> dict[str, Any]:
    """The result of a line that was not done when its batch expired."""
    error = {"code": "batch_expired", "message": "the batch expired before this line was done"}
    return {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}
