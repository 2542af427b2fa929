"""How a link begins and ends, the role that this router asked its worker to take, and what kind of
worker it is (`router.workers.link`)."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final
from weakref import WeakValueDictionary

from baton.worker.v1 import worker_pb2

ASKED_S: Final = 5.0
"""So many seconds an asked role counts that no report shows: fifty reports of a worker that is
well. One that takes longer stands still, or another router asked it for something else."""
_NONE: Final = worker_pb2.WORKER_ROLE_UNSPECIFIED


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


class AskedRole:
    """What was asked of one worker last.

    Args:
        clock: a steady one, seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._role: worker_pb2.WorkerRole.ValueType = _NONE
        self._former: worker_pb2.WorkerRole.ValueType = _NONE
        self._until_s = 0.0

    @property
    def role(self) -> worker_pb2.WorkerRole.ValueType:
        """The asked role that no report has shown yet; unspecified if there is none."""
        return self._role if self._role and self._clock() < self._until_s else _NONE

    @property
    def former(self) -> worker_pb2.WorkerRole.ValueType:
        """The role that it had when it was asked a moment ago; unspecified if it was not."""
        return self._former if self._former and self._clock() < self._until_s else _NONE

    def ask(
        self,
        role: worker_pb2.WorkerRole.ValueType,
        former: worker_pb2.WorkerRole.ValueType = _NONE,
    ) -> None:
        """It is asked for a role now. Without a former role it is never sent back."""
        self._role, self._former, self._until_s = role, former, self._clock() + ASKED_S

    def reported(self, role: worker_pb2.WorkerRole.ValueType) -> None:
        """A report shows that it has a role, or is on its way to it."""
        if role == self._role:
            self._role = _NONE


@dataclass(frozen=True, eq=False)
class Kind:
    """Workers of one kind differ in nothing that a route depends on but their load and the size of
    their pools. It is known as long as some worker is of it: workers load and unload adapters for
    ever, and each set of adapters makes another kind."""

    number: int
    """From 1. No other kind ever has it."""


_numbers = count(1)
_kinds: WeakValueDictionary[tuple[object, ...], Kind] = WeakValueDictionary()


def kind_of(properties: tuple[object, ...]) -> Kind:
    """The kind of workers with these properties."""
    found = _kinds.get(properties)
    if found is None:
        found = _kinds[properties] = Kind(next(_numbers))
    return found
