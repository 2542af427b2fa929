"""JSON for everybody: with the numbers that JSON has, and on one line where that counts.

Events of streams and results of batches are lines, and JSON escapes line feeds in its texts. But
Python's `str.splitlines`, and httpx's `iter_lines` with it, also divide at three characters that
JSON leaves as they are.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic_core import to_json

_ENDS: Final = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029")


def one_line(data: bytes) -> bytes:
    """JSON with these characters escaped. They occur in its texts alone."""
    for end, escaped in _ENDS:
        if end in data:
            data = data.replace(end, escaped)
    return data


def json_of(content: Any) -> bytes:
    """A value as JSON. Infinity and NaN, which JSON has not, are null: a number such as 1e400 is
    read as infinity.

    Raises:
        ValueError: a text has half of a surrogate pair.
    """
    return to_json(content, inf_nan_mode="null")


def json_line(content: Any) -> bytes:
    """A value as JSON on one line; see `json_of`."""
    return one_line(json_of(content))
