"""The short way of a token: from a worker's message to the socket, in that message's handler.

While the task of an answer waits for its next output, nothing of the stream is on the way. A delta
that comes then and adds nothing but text can be written by the handler itself (`OutputBuffer`
offers it). Its event is a `Template`: an event of the usual way, written with marks where text and
number go. So the usual way says how events look, and any delta that a door cannot write so goes
that way: see "The short way of a token" in docs/architecture.md.
"""

from __future__ import annotations

import json.encoder
import secrets
from typing import TYPE_CHECKING, Any, Final, Protocol

from router.one_line import one_line

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    Frame = Callable[[dict[str, Any]], bytes]

    from router.requests.outputs import TextDelta

MARK: Final = f"baton-{secrets.token_hex(16)}"
"""Stands for the text in a template. Nobody can send it."""
NUMBER: Final = secrets.randbits(52) | 1 << 52
"""Stands for the event's number."""
MOST_WAITING_BYTES: Final = 4096
"""A connection that has more than this to send goes the usual way, on which tokens are merged for
a client that reads slowly."""
_QUOTED: Final = json.encoder.encode_basestring
_QUOTED_MARK: Final = f'"{MARK}"'


class Template:
    """An event of a stream, around its text. `event` is one with `MARK` and perhaps `NUMBER`."""

    def __init__(self, event: bytes) -> None:
        head, *tail = event.decode().split(str(NUMBER))
        self._head = head if tail else ""
        self._pieces = (tail[0] if tail else head).split(_QUOTED_MARK)

    def event(self, text: str, number: int) -> bytes:
        """The event with a text, and a number if the event has one."""
        written = _QUOTED(text).join(self._pieces)
        return one_line((f"{self._head}{number}{written}" if self._head else written).encode())


class Connection(Protocol):
    """The part of a connection that is used here (`router.doors.http.connections`)."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes written that the system has not taken; more than any bound once it closes."""
        ...

    def write(self, data: bytes) -> None:
        """Writes in the midst of a chunked answer."""
        ...


class Straight:
    """Writes the events of one answer straight to its connection.

    Args:
        connection: speaks HTTP/1.1, so that each event is a chunk.
        writing: held while a part is written the usual way.
        frame: an event as bytes, as the usual way has it.
    """

    def __init__(
        self,
        connection: Connection,
        writing: asyncio.Lock,
        frame: Frame,
    ) -> None:
        self._connection = connection
        self._writing = writing
        self.frame = frame
        self.begun = False
        """Whether the head of the answer is out."""
        self.wrote_s = 0.0
        """When the latest part was written, by the loop's clock."""

    def is_free(self) -> bool:
        """Whether the connection takes an event now."""
        return (
            self.begun
            and not self._writing.locked()
            and self._connection.waiting_bytes <= MOST_WAITING_BYTES
        )

    def write(self, event: bytes, now_s: float) -> None:
        """Writes an event."""
        self.wrote_s = now_s
        self._connection.write(chunk_of(event))


def chunk_of(event: bytes) -> bytes:
    """An event as a chunk of HTTP/1.1."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def text_of(delta: TextDelta) -> tuple[str, str] | None:
    """Kind and text of a delta that adds to one kind at most; None if it adds more, or calls or
    log probabilities."""
    if delta.calls or delta.logprobs:
        return None
    if not delta.reasoning:
        texts = delta.texts
        return "text", texts[0] if len(texts) == 1 else "".join(texts)
    return None if delta.texts else ("thinking", "".join(delta.reasoning))
