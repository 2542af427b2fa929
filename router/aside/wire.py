"""What the router and its processes aside say to each other.

Two kinds of sockets: a fork server has one for orders, on which each message is one JSON object; a
process that it forked has one for its work, on which each message has its length before it.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, Final, NamedTuple

HEAD: Final = struct.Struct("<BI")
"""Head of a message: whether the work was done (`DONE` or `FAILED`), and its bytes."""
DONE: Final = 0
FAILED: Final = 1
"""The work raised; the message says what and where, and nothing of its content."""
BEGUN: Final = b"+"
"""What a forked process says first. If it ends after that, its work has ended it."""
MOST_ORDER_BYTES: Final = 16_384
"""An order is one packet with names and limits; what a client sent comes through the socket that it
carries."""


class Bounds(NamedTuple):
    """What one task may take."""

    cpu_s: float
    memory_bytes: int
    """Address space beyond that of the fork server."""
    time_s: float
    """Time until the answer. It is generous: it counts on a machine that is busy, too."""


def read(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    return stream.read(HEAD.unpack(head)[1])


def message(data: bytes, kind: int = DONE) -> bytes:
    """A message as it is sent."""
    return HEAD.pack(kind, len(data)) + data
