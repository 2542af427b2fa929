"""Which release a process is of: routers and workers that speak different protocols refuse each
other, by name, before any work is sent.

The protocol is known by a digest of `protos/baton/worker/v1/worker.proto`, so that releases which
did not change it work together.
"""

from __future__ import annotations

import hashlib
from typing import Final, TypeVar

from baton import __version__
from baton.worker.v1 import worker_pb2

PROTOCOL: Final = hashlib.sha256(worker_pb2.DESCRIPTOR.serialized_pb).hexdigest()[:16]

Stamped = TypeVar("Stamped", worker_pb2.WorkerIdentity, worker_pb2.Attach)


def stamp(message: Stamped) -> Stamped:
    """Says in a message which release sends it; returns the message."""
    message.release, message.protocol = __version__, PROTOCOL
    return message


def refusal(sender: str, message: worker_pb2.WorkerIdentity | worker_pb2.Attach) -> str:
    """Why a message's sender must be refused; empty where it speaks this protocol.

    Args:
        sender: who sent it, such as "worker decode-0".
        message: as `stamp` marked it, or another release did not.
    """
    if message.protocol == PROTOCOL:
        return ""
    release = message.release or "unknown"
    return (
        f"{sender} is of another release of Baton ({release}, protocol"
        f" {message.protocol or 'unknown'}; here {__version__}, {PROTOCOL}): run one release"
    )
