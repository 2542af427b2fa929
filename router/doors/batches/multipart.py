"""Reads an upload: the fields of a form, and one file among them, as its bytes come.

The form is `multipart/form-data` (RFC 7578). Only what it is made of is read: a boundary, the name
of each part in `content-disposition`, and its bytes. Nothing is kept but short fields.
"""

from __future__ import annotations

from collections.abc import Callable
from email.message import Message
from typing import Final

from router import errors

MOST_HEADER_BYTES: Final = 4096
"""Bytes of the headers of a part: several times what clients send."""
MOST_FIELD_BYTES: Final = 1024
"""Bytes of a field that is no file."""
MOST_PARTS: Final = 16
"""Parts of a form. OpenAI's has five."""


class Upload:
    """One form.

    Args:
        content_type: the header, with the boundary.
        write: takes the file's bytes.

    Raises:
        RouterError: MALFORMED_REQUEST, here and of `feed` and `close`.
    """

    def __init__(self, content_type: str, write: Callable[[bytes], None]) -> None:
        said = Message()
        said["content-type"] = content_type
        boundary = said.get_param("boundary")
        if said.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
            raise errors.malformed_request("the content type must be multipart/form-data")
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
        said = Message()
        for line in headers.split(b"\r\n"):
            name, _, value = line.decode("utf-8", "replace").partition(":")
            if name.strip().lower() == "content-disposition":
                said["content-disposition"] = value.strip()
        part = said.get_param("name", header="content-disposition")
        if not isinstance(part, str) or part in self.fields:
            raise errors.malformed_request("each part of the form needs a name of its own")
        self._part = part
        if part != "file":
            self.fields[part] = ""
        elif self.filename is None:
            try:
                self.filename = said.get_filename("")
                self.filename.encode()
            except ValueError:  # Python's own charsets; half of a surrogate pair.
                raise errors.malformed_request("the file's name is no text") from None
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
