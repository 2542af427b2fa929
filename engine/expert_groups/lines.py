"""Messages between the workers of an expert group: a JSON object a line, over a Unix socket."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Callable, Iterator
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


def pid_of(other: socket.socket) -> int:
    """The process at the other end; 0 where it is in a PID namespace that cannot be seen here."""
    pid, _, _ = struct.unpack("3i", other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)


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

    def all(self, look_s: float, look: Callable[[], None]) -> Iterator[Message]:
        """Messages until the other end is gone. Calls `look` whenever some come, and else every
        `look_s` seconds."""
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        while True:
            comes = poll.poll(1e3 * look_s)
            look()
            if not comes:
                continue
            if (found := self.read()) is None:
                return
            yield from found
