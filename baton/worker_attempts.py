"""What both services know of an attempt, which attempts they know, and what ends one from outside.

An attempt belongs to the stream that it was submitted on: it ends with it, and no other stream can
touch it.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Self, TypeVar

from baton.worker.v1 import worker_pb2
from baton.worker_outbox import Outbox
from baton.worker_spans import CANCELLED, EXPIRED
from baton.worker_wire import failed_message, request_of
from engine.types import FailureReason, Request
from kv_transfer.tables import BoundedMemory, Clock

logger = logging.getLogger(__name__)

DEADLINE_GRACE_S: Final = 1.0
"""The router ends a request at its deadline; this much later the worker does it for itself."""
MAX_REMEMBERED: Final = 1 << 16
REMEMBERED_S: Final = 3600.0


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One attempt of one stream. Times are Unix nanoseconds, 0 before they are known."""

    request: Request
    stream: Outbox
    peer: str
    """Agent name of the other side of the hand-off; empty where there is none."""
    traceparent: str
    expires_s: float
    """On the table's clock: it fails then, wherever it stands; infinity for never."""
    received_ns: int
    silent: bool = False
    """The router wants to hear no more of it."""
    started_ns: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    choices_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.choices_left = self.request.choices

    @classmethod
    def received(cls, submit: worker_pb2.Submit, stream: Outbox, now_s: float) -> Self:
        """The attempt that a Submit asks for; `now_s` is on the table's clock.

        Raises:
            MalformedMessage: no sender of this version makes such a Submit.
        """
        has_limit = submit.HasField("time_left_ms")
        left_s = submit.time_left_ms / 1e3 + DEADLINE_GRACE_S if has_limit else math.inf
        return cls(
            request=request_of(submit),
            stream=stream,
            peer=submit.peer_agent_name,
            traceparent=submit.traceparent,
            expires_s=now_s + left_s,
            received_ns=time.time_ns(),
        )

    @property
    def id(self) -> bytes:
        """Names it everywhere, in the engine as well."""
        return self.request.id

    def tell(self, **message: Any) -> None:
        """Sends the router a message: `tell(delivered=Delivered(...))`."""
        if not self.silent:
            self.stream.send(worker_pb2.WorkResponse(**message))

    def fail(self, reason: worker_pb2.FailureReason.ValueType | FailureReason) -> None:
        """Tells the router that the attempt failed, as the last it hears of it."""
        if not self.silent:
            self.stream.send(failed_message(self.id, reason))
        self.silent = True


A = TypeVar("A", bound=Attempt)


class Attempts(Generic[A]):
    """Attempts under way at one service.

    Invariant: an id is under way at most once, and never again after it was over, or after its
    Cancel overtook its Submit.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._attempts: dict[bytes, A] = {}
        self._over: BoundedMemory[bytes, bool] = BoundedMemory(MAX_REMEMBERED, REMEMBERED_S, clock)

    def __len__(self) -> int:
        return len(self._attempts)

    def __iter__(self) -> Iterator[A]:
        """Over a copy: attempts may end meanwhile."""
        return iter(list(self._attempts.values()))

    def is_new(self, attempt_id: bytes) -> bool:
        """Whether an attempt of that id may begin."""
        return attempt_id not in self._attempts and attempt_id not in self._over

    def add(self, attempt: A) -> None:
        """It is under way."""
        self._attempts[attempt.id] = attempt

    def get(self, attempt_id: bytes) -> A | None:
        """The attempt, while it is under way."""
        return self._attempts.get(attempt_id)

    def of(self, attempt_id: bytes, stream: Outbox) -> A | None:
        """The attempt, if that stream submitted it."""
        attempt = self._attempts.get(attempt_id)
        return attempt if attempt is not None and attempt.stream is stream else None

    def end(self, attempt_id: bytes, was_ready: bool = False) -> None:
        """It is over, or must not begin; `was_ready`: its KV had been delivered."""
        self._attempts.pop(attempt_id, None)
        self._over.add(attempt_id, was_ready)

    def was_ready(self, attempt_id: bytes) -> bool:
        """Whether an attempt that is over had its KV delivered."""
        return bool(self._over.get(attempt_id))

    def expired(self) -> Iterator[A]:
        """Attempts whose time is up."""
        now_s = self.clock()
        return (attempt for attempt in self if attempt.expires_s <= now_s)


class AttemptsService(ABC, Generic[A]):
    """A service's attempts, and the four things from outside that end one: the router's word, the
    end of its stream, its deadline, and the end of the process; and a bug. An attempt that cannot
    be ended keeps no other from its end."""

    def __init__(self, clock: Clock) -> None:
        self._attempts: Attempts[A] = Attempts(clock)

    def holds(self, attempt_id: bytes) -> bool:
        """Whether the attempt is under way here."""
        return self._attempts.get(attempt_id) is not None

    def cancel(self, attempt_id: bytes, stream: Outbox) -> None:
        """The router wants no more of an attempt, which it may not even have submitted yet."""
        if (attempt := self._attempts.of(attempt_id, stream)) is not None:
            attempt.silent = True
            self._end_early(attempt, CANCELLED)
        elif self._attempts.is_new(attempt_id):
            self._attempts.end(attempt_id)

    def end_stream(self, stream: Outbox) -> None:
        """A router is gone, and all its attempts with it."""
        for attempt in self._attempts:
            if attempt.stream is stream:
                with self._ending_if_broken(attempt):
                    self.cancel(attempt.id, stream)

    def expire(self) -> None:
        """Fails attempts whose time is up."""
        for attempt in self._attempts.expired():
            attempt.expires_s = math.inf  # told once, whatever comes of it
            with self._ending_if_broken(attempt):
                attempt.fail(worker_pb2.FAILURE_REASON_EXPIRED)
                self._end_early(attempt, EXPIRED)

    def fail_all(self, reason: worker_pb2.FailureReason.ValueType) -> None:
        """Ends every attempt: the process ends."""
        for attempt in self._attempts:
            with self._ending_if_broken(attempt):
                attempt.fail(reason)
                self._end_early(attempt, CANCELLED)

    @contextmanager
    def _ending_if_broken(self, attempt: A) -> Iterator[None]:
        """An event of an attempt is taken in here, or its end. One that breaks its handler ends its
        attempt, which would wait for ever otherwise, and leaves what is behind it to its turn."""
        try:
            yield
        except Exception:
            logger.exception("an event of an attempt broke its handler")
            self._give_up(attempt)

    def _give_up(self, attempt: A) -> None:
        attempt.fail(worker_pb2.FAILURE_REASON_INTERNAL)
        try:
            self._end_early(attempt, FailureReason.INTERNAL.value)
        except Exception:
            logger.exception("an attempt could not be ended")

    @abstractmethod
    def _end_early(self, attempt: A, error: str = "") -> None:
        """Ends an attempt in any state; `error` says why in its spans, where that is no success."""
