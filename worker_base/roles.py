"""The role of a running worker, and how it changes.

Life of a change:

1. A router passes on what an operator or the balance asks for (`SetRole`).
2. LEAVING: legs run of which the new role has none. Load reports name the next role, so routers
   send nothing new; legs that were on their way are run like the others.
3. The last of these legs is over. Those that take longer than `most_s` fail with DRAINING, and the
   routers go on with them elsewhere.
4. The worker has the new role: reports and announcements say so. Without such legs this is at once.

Weights, pages, their keys, peers and the epoch stay. What changes is which work routers send, and
how much of prompts a step takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from baton.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from engine.bounds import PromptLimits

logger = logging.getLogger(__name__)


class Legs(Protocol):
    """The legs of a worker."""

    def lacking(self, role: worker_pb2.WorkerRole.ValueType) -> int:
        """Counts those under way of which a worker of that role has none."""
        ...

    def fail_lacking(
        self, role: worker_pb2.WorkerRole.ValueType, reason: worker_pb2.FailureReason.ValueType
    ) -> None:
        """Fails these."""
        ...


class CurrentRole:
    """The role of a worker. Belongs to the event loop.

    Args:
        identity: the worker's; its role follows.
        legs: some must end before a change.
        limits: by role, what a step takes of prompts; none if the role never changes.
        limit: makes the engine keep to limits.
        changed: called after each step of a change, to report it.
        most_s: longest time that legs may run on.
    """

    def __init__(
        self,
        identity: worker_pb2.WorkerIdentity,
        legs: Legs,
        limits: Mapping[worker_pb2.WorkerRole.ValueType, PromptLimits],
        limit: Callable[[PromptLimits], None],
        changed: Callable[[], None],
        most_s: float,
    ) -> None:
        self._identity = identity
        self._legs = legs
        self._limits = limits
        self._limit = limit
        self._changed = changed
        self._most_s = most_s
        self._next: worker_pb2.WorkerRole.ValueType = worker_pb2.WORKER_ROLE_UNSPECIFIED
        self._until_s = 0.0
        if limits:
            limit(limits[identity.role])

    def fill(self, load: worker_pb2.Load) -> None:
        """Writes the role into a load report; nothing if it never changes."""
        if self._limits:
            load.role, load.next_role = self._identity.role, self._next

    def set(self, role: worker_pb2.WorkerRole.ValueType) -> None:
        """Begins a change. Its own role ends a change under way; an unknown one is ignored."""
        if role not in self._limits or role == self._next:
            return
        if role == self._identity.role:
            self._next = worker_pb2.WORKER_ROLE_UNSPECIFIED
            self._changed()
            return
        self._next, self._until_s = role, time.monotonic() + self._most_s
        details = {"from": _name(self._identity.role), "to": _name(role)}
        logger.info("role changes", extra=details | {"legs": self._legs_left()})
        self._changed()
        self.tick()

    def tick(self) -> None:
        """Ends a change that nothing holds up any more. Called often."""
        if not self._next:
            return
        left = self._legs_left()
        late = time.monotonic() >= self._until_s
        if left and late:
            logger.info("role changes: other workers go on", extra={"legs": left})
            self._legs.fail_lacking(self._next, worker_pb2.FAILURE_REASON_DRAINING)
        if late or not left:
            self._identity.role, self._next = self._next, worker_pb2.WORKER_ROLE_UNSPECIFIED
            self._limit(self._limits[self._identity.role])
            logger.info("role changed", extra={"role": _name(self._identity.role)})
            self._changed()

    def _legs_left(self) -> int:
        """Legs that run and of which the next role has none."""
        return self._legs.lacking(self._next)


def _name(role: worker_pb2.WorkerRole.ValueType) -> str:
    return worker_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()
