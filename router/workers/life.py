"""How a link begins and ends (`router.workers.link`)."""

from __future__ import annotations

import enum


class LinkState(enum.IntEnum):
    """State of a link. LOST is the smallest."""

    LOST = 0
    CONNECTING = 1
    ATTACHED = 2


class Loss(enum.Enum):
    """The cause of a lost link."""

    SOCKET_CLOSED = "socket closed"
    """The peer's kernel closed it without a goodbye, for example because the process died."""
    STREAM_ENDED = "stream ended"
    """The worker ended it, or the connection answered no ping."""
    FROZEN = "frozen"
    """The progress counter stood still."""
    REFUSED = "refused"
    """Another worker answered than the one that was announced."""
    UNTRUSTED = "untrusted"
    """It showed no valid certificate of the worker that was announced."""
    CONGESTED = "congested"
    """The worker does not read its stream."""
    CLOSED = "closed"
    """This router closes."""
