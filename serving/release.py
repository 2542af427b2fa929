"""Compares the releases of routers and workers. Different protocols refuse each other at once.

A digest of `protos/baton/worker/v1/worker.proto` identifies the protocol, so releases with the same
protocol work together. A refusal names both releases, before any work is sent.
"""

from __future__ import annotations

import hashlib
from typing import Final, TypeVar

from baton.version import __version__
from baton.worker.v1 import worker_pb2

PROTOCOL: Final = hashlib.sha256(worker_pb2.DESCRIPTOR.serialized_pb).hexdigest()[:16]

Stamped = TypeVar("Stamped", worker_pb2.WorkerIdentity, worker_pb2.Attach)


def stamp(message: Stamped) -> Stamped:
    """Writes this release and its protocol into a message, and returns the message."""
    message.release, message.protocol = __version__, PROTOCOL
    return message


def refusal(sender: str, message: worker_pb2.WorkerIdentity | worker_pb2.Attach) -> str:
    """Returns a reason to refuse a message's sender; empty if it speaks this protocol.

    Args:
        sender: name of the sender, such as "worker decode-0".
        message: its message; other releases may have left out the stamp.
    """
    if message.protocol == PROTOCOL:
        return ""
    release = message.release or "unknown"
    return (
        f"{sender} is of another release of Baton ({release}, protocol"
        f" {message.protocol or 'unknown'}; here {__version__}, {PROTOCOL}): run one release"
    )
