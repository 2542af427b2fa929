"""Compares the protocols of routers and workers, so that releases can serve side by side.

`PROTOCOL` is the number of `protos/baton/worker/v1/worker.proto`, major and minor:

- Minor numbers work together. A receiver ignores what it does not know. Who sends a thing that must
  not be ignored looks at the number that the receiver announced.
- Another major number is refused by name, before any work is sent.

`docs/releasing.md` says when to raise which. Until 0.2.0 a digest of the file stood in the number's
place; such a sender is refused, too.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, TypeVar

from baton.version import __version__
from baton.worker.v1 import worker_pb2


class Protocol(NamedTuple):
    """A number of the protocol between routers and workers; newer ones are greater."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


PROTOCOL: Final = Protocol(1, 2)

Stamped = TypeVar("Stamped", worker_pb2.WorkerIdentity, worker_pb2.Attach)


def stamp(message: Stamped) -> Stamped:
    """Writes this release and its protocol into a message, and returns the message."""
    message.release, message.protocol = __version__, str(PROTOCOL)
    return message


def protocol_of(message: worker_pb2.WorkerIdentity | worker_pb2.Attach) -> Protocol | None:
    """Returns the protocol that the sender of a message speaks; None if it gives no number."""
    numbers = re.fullmatch(r"(\d{1,9})\.(\d{1,9})", message.protocol, re.ASCII)
    return Protocol(*map(int, numbers.groups())) if numbers else None


def version_mismatch(sender: str, message: worker_pb2.WorkerIdentity | worker_pb2.Attach) -> str:
    """Returns a reason to refuse a message's sender; empty if the two can work together.

    Args:
        sender: name of the sender, such as "worker decode-0".
        message: its message; other releases may have left out the stamp.
    """
    theirs = protocol_of(message)
    if theirs is not None and theirs.major == PROTOCOL.major:
        return ""
    release = message.release or "unknown"
    return (
        f"{sender} is of another release of Baton ({release}, protocol"
        f" {message.protocol or 'unknown'}; here {__version__}, {PROTOCOL}): run releases whose"
        " protocols have one major number"
    )
