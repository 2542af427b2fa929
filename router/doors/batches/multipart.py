"""Reads an upload: the fields of a form, and one file among them, as its bytes come.

The form is `multipart/form-data` (RFC 7578). Only what it is made of is read: a boundary, the name
of each part in `content-disposition`, and its bytes. Nothing is kept but short fields. Headers are
read in linear time: Python's own reader takes 8 s for one of 60,000 semicolons.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote

from router import errors

MOST_TYPE_CHARS: Final = 1024
"""Characters of the header with the boundary, which may have 70."""
MOST_HEADER_BYTES: Final = 4096
"""Bytes of the headers of a part: several times what clients send."""
MOST_FIELD_BYTES: Final = 1024
"""Bytes of a field that is no file."""
MOST_PARTS: Final = 16
"""Parts of a form. OpenAI's has five."""
_PARAMETER: Final = re.compile(
    r';\s*+([^\s;="]++)\s*+=\s*+(?:"((?:[^"\\]++|\\.)*+)"?+|([^;]*+))', re.DOTALL
)
_NAME_CHARSETS: Final = ("utf-8", "iso-8859-1")
"""Charsets that a file's name may state (RFC 5987)."""


class Upload:
    """One form.

    Args:
        content_type: the header, with the boundary.
        write: takes the file's bytes.

    Raises:
        RouterError: MALFORMED_REQUEST, here and of `feed` and `close`.
    """

    def __init__(self, content_type: str, write: Callable[[bytes], None]) -> None:
        if len(content_type) > MOST_TYPE_CHARS:
            raise errors.malformed_request("the content type is too long")
        if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
            raise errors.malformed_request("the content type must be multipart/form-data")
        boundary = _parameters(content_type).get("boundary", "")
        if not 1 <= len(boundary) <= 70:
            raise errors.malformed_request("a boundary has 1 to 70 characters")
        self._mark = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._write = write
        self._held = bytearray(b"\r\n")  # The first mark may stand at the very beginning.
        self._step: Callable[[], bool] = self._before
        self._part = ""
        self._parts = 0
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """The name that the file's owner gave it; None: no file came."""

    def feed(self, data: bytes) -> None:
        """Takes further bytes of the body."""
        self._held += data
        while self._step():
            pass

    def close(self) -> None:
        """The body is at its end."""
        if self._step != self._after:
            raise errors.malformed_request("the form ends before its last boundary")

    def _before(self) -> bool:
        """What stands before the first part, which is nothing."""
        if len(self._held) < len(self._mark):
            return False
        if not self._held.startswith(self._mark):
            raise errors.malformed_request("the form does not begin with its boundary")
        del self._held[: len(self._mark)]
        self._step = self._behind_mark
        return True

    def _behind_mark(self) -> bool:
        if len(self._held) < 2:
            return False
        ending = bytes(self._held[:2])
        del self._held[:2]
        if ending not in (b"\r\n", b"--"):
            raise errors.malformed_request("a boundary of the form is followed by something else")
        self._step = self._headers if ending == b"\r\n" else self._after
        return True

    def _headers(self) -> bool:
        end = self._held.find(b"\r\n\r\n", 0, MOST_HEADER_BYTES)
        if end < 0:
            if len(self._held) >= MOST_HEADER_BYTES:
                raise errors.malformed_request("the headers of a part are too long")
            return False
        self._begin(bytes(self._held[:end]))
        del self._held[: end + 4]
        self._step = self._content
        return True

    def _begin(self, headers: bytes) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise errors.malformed_request(f"the form has more than {MOST_PARTS} parts")
        said: dict[str, str] = {}
        for line in headers.split(b"\r\n"):
            name, _, value = line.decode("utf-8", "replace").partition(":")
            if name.strip().lower() == "content-disposition":
                said = _parameters(value)
        part = said.get("name")
        if part is None or part in self.fields:
            raise errors.malformed_request("each part of the form needs a name of its own")
        self._part = part
        if part != "file":
            self.fields[part] = ""
        elif self.filename is None:
            self.filename = _filename(said)
        else:
            raise errors.malformed_request("the form has more than one file")

    def _content(self) -> bool:
        end = self._held.find(self._mark)
        # The last bytes may be the beginning of a mark.
        size = end if end >= 0 else max(0, len(self._held) - len(self._mark) + 1)
        if size:
            self._take(bytes(self._held[:size]))
            del self._held[:size]
        if end < 0:
            return False
        del self._held[: len(self._mark)]
        self._step = self._behind_mark
        return True

    def _take(self, data: bytes) -> None:
        if self._part == "file":
            self._write(data)
            return
        text = self.fields[self._part] + data.decode("utf-8", "replace")
        if len(text) > MOST_FIELD_BYTES:
            raise errors.malformed_request("a field of the form is too long")
        self.fields[self._part] = text

    def _after(self) -> bool:
        self._held.clear()
        return False


def _parameters(header: str) -> dict[str, str]:
    """The parameters of a header. Of those with the same name the first counts."""
    found: dict[str, str] = {}
    for name, quoted, plain in _PARAMETER.findall(header):
        text = quoted.replace(r"\\", "\\").replace(r"\"", '"') or plain.strip()
        found.setdefault(name.lower(), text)
    return found


def _filename(said: dict[str, str]) -> str:
    """The file's name; empty: it has none.

    Raises:
        RouterError: MALFORMED_REQUEST.
    """
    if (name := said.get("filename")) is not None or "filename*" not in said:
        return name or ""
    charset, _, rest = said["filename*"].partition("'")
    try:
        if charset.lower() not in _NAME_CHARSETS:
            raise ValueError
        return unquote(rest.partition("'")[2], charset, "strict")
    except ValueError:
        raise errors.malformed_request("the file's name is no text") from None
