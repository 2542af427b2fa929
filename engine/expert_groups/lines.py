"""Messages between the workers of an expert group: a JSON object a line, over a Unix socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, Final

_MOST_BYTES: Final = 1 << 16
"""Most bytes of a message, and of a read: each has some dozens."""
Message = dict[str, Any]


def send(to: socket.socket, message: Message) -> None:
    """Sends a message. One whose reader is gone is lost: who reads from it will notice."""
    try:
        to.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return


class Reader:
    """Puts messages together from what comes."""

    def __init__(self, source: socket.socket) -> None:
        self._source, self._rest = source, b""

    def read(self) -> list[Message] | None:
        """Waits for bytes; returns the messages that are complete now. None: the other end is gone,
        or sends something else."""
        try:
            came = self._source.recv(_MOST_BYTES)
        except OSError:
            return None
        *lines, self._rest = (self._rest + came).split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            return None
        is_wrong = len(self._rest) > _MOST_BYTES or not all(isinstance(m, dict) for m in found)
        return None if not came or is_wrong else found

    def all(self) -> Iterator[Message]:
        """Messages until the other end is gone."""
        while (found := self.read()) is not None:
            yield from found
