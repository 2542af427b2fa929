"""A leg is one worker's part in an attempt. Both services' legs share this module.

Life of a leg at either service:

1. Under way: a router submitted it, and the service's table has it.
2. Its outcome is known: the leg keeps the time and the reason, and its spans are written.
3. Over: nothing outside this process touches its pages any more, and the table forgets it. Its id
   is remembered for a while, so that a message that comes late begins nothing.

A leg belongs to the stream that it was submitted on. It ends with that stream, and no other stream
can touch it.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Self, TypeVar

from baton.worker.v1 import worker_pb2
from engine.types import EndReason, FailureReason, Request, TokenRecord
from kv_transfer.tables import BoundedMemory, Clock
from worker_base.messages import end_reason_message, failed_message, record_message, request_of
from worker_base.outbox import Outbox

logger = logging.getLogger(__name__)

DEADLINE_GRACE_S: Final = 1.0
"""The router ends a request at its deadline. The worker ends it by itself this much later."""
MAX_REMEMBERED: Final = 1 << 16
"""Ended legs, whose late Submit is refused: nearly two hours of them at ten a second."""
REMEMBERED_S: Final = 3600.0
"""No message of a leg is on its way for longer than a request may last."""

# Why a leg failed, in its spans.
CANCELLED: Final = "cancelled"
EXPIRED: Final = "expired"
KV_TRANSFER: Final = "kv_transfer"


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerLeg:
    """One leg of one stream. Times are Unix nanoseconds, 0 before they are known."""

    request: Request
    stream: Outbox
    peer: str
    """Agent name of the other worker of the hand-off; empty if there is no hand-off."""
    traceparent: str
    expires_s: float
    """The leg fails at this time of the table's clock, in any state; infinity means never."""
    received_ns: int
    silent: bool = False
    """The router wants to hear no more of the leg."""
    started_ns: int = 0
    computed_ns: int = 0
    """This worker sampled the first token."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Cached tokens that came from tiers below the pool for this leg, by tier."""
    over_ns: int = 0
    """The outcome became known."""
    error: str = ""
    """The short stable word for spans that says why the leg failed; empty if it did not."""
    choices_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.choices_left = self.request.choices

    @classmethod
    def received(cls, submit: worker_pb2.Submit, stream: Outbox, now_s: float) -> Self:
        """Makes the leg that a Submit asks for; `now_s` is on the table's clock.

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
        """The attempt's id. Router, engine and peer all use it."""
        return self.request.id

    def send(self, **message: Any) -> None:
        """Sends the router a message: `send(delivered=Delivered(...))`."""
        if not self.silent:
            self.stream.send(worker_pb2.WorkResponse(**message))

    def send_first_tokens(self, records: Sequence[TokenRecord]) -> None:
        """Sends the router the first new token of every choice."""
        first_token = worker_pb2.FirstToken(
            attempt_id=self.id,
            records=[record_message(record) for record in records],
            cached_prompt_tokens=self.cached_tokens,
            loaded_prompt_tokens=self.loaded_tokens,
        )
        self.send(first_token=first_token)

    def send_finished(
        self,
        choice: int,
        reason: EndReason,
        output_tokens: int,
        timings: worker_pb2.WorkTimings | None,
        drafts: tuple[int, int] = (0, 0),
        score: float | None = None,
    ) -> None:
        """Reports to the router that a choice ended; the last choice's message carries the timings.
        `drafts`: how many were verified, and accepted. `score`: of what a search found."""
        finished = worker_pb2.Finished(
            attempt_id=self.id,
            choice_index=choice,
            reason=end_reason_message(reason),
            output_tokens=output_tokens,
            timings=timings,
            drafted_tokens=drafts[0],
            accepted_tokens=drafts[1],
            score=score,
        )
        self.send(finished=finished)

    def fail(
        self, reason: worker_pb2.FailureReason.ValueType | FailureReason, hook: str = ""
    ) -> None:
        """Reports to the router that the leg failed, and by which hook, if it was one. The router
        hears nothing of the leg after that."""
        if reason is FailureReason.NO_TOKEN and not self.stream.knows_no_token:
            reason = FailureReason.STRUCTURE  # Routers of 0.2.0 break at a reason that is new.
        if not self.silent:
            self.stream.send(failed_message(self.id, reason, hook))
        self.silent = True

    def conclude(self, error: str = "") -> None:
        """Keeps the outcome and its time, for the spans."""
        self.over_ns, self.error = time.time_ns(), error


L = TypeVar("L", bound=WorkerLeg)


class LegTable(Generic[L]):
    """The legs under way at one service, by id.

    Invariant: an id is under way at most once. It is never under way again after its leg was over,
    or after its Cancel overtook its Submit.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._legs: dict[bytes, L] = {}
        self._over: BoundedMemory[bytes, bool] = BoundedMemory(MAX_REMEMBERED, REMEMBERED_S, clock)

    def __len__(self) -> int:
        return len(self._legs)

    def __iter__(self) -> Iterator[L]:
        """Iterates over a copy, because legs may end meanwhile."""
        return iter(list(self._legs.values()))

    def is_new(self, leg_id: bytes) -> bool:
        """Whether a leg of that id may begin."""
        return leg_id not in self._legs and leg_id not in self._over

    def add(self, leg: L) -> None:
        """Puts a leg under way."""
        self._legs[leg.id] = leg

    def get(self, leg_id: bytes) -> L | None:
        """Returns the leg while it is under way. Any thread may ask."""
        return self._legs.get(leg_id)

    def of(self, leg_id: bytes, stream: Outbox) -> L | None:
        """Returns the leg if that stream submitted it."""
        leg = self._legs.get(leg_id)
        return leg if leg is not None and leg.stream is stream else None

    def end(self, leg_id: bytes, was_ready: bool = False) -> None:
        """Forgets a leg, or keeps one from beginning; `was_ready`: its KV had been delivered."""
        self._legs.pop(leg_id, None)
        self._over.add(leg_id, was_ready)

    def was_ready(self, leg_id: bytes) -> bool:
        """Whether the KV of a leg that is over had been delivered."""
        return bool(self._over.get(leg_id))

    def expired(self) -> Iterator[L]:
        """Yields the legs whose time is up."""
        now_s = self.clock()
        return (leg for leg in self if leg.expires_s <= now_s)


class LegService(ABC, Generic[L]):
    """A service's legs, and the ways to end them early.

    The router's word, the end of the stream, the deadline and the end of the process end a leg. So
    does a bug in the handler of one of its events. If a leg cannot be ended, the others still are.
    """

    def __init__(self, clock: Clock) -> None:
        self._legs: LegTable[L] = LegTable(clock)

    def holds(self, leg_id: bytes) -> bool:
        """Whether the leg is under way here."""
        return self._legs.get(leg_id) is not None

    def leg(self, leg_id: bytes) -> L | None:
        """The leg, if it is under way here."""
        return self._legs.get(leg_id)

    def cancel(self, leg_id: bytes, stream: Outbox) -> None:
        """Ends a leg that the router no longer wants. Its Submit may still be on the way."""
        if (leg := self._legs.of(leg_id, stream)) is not None:
            leg.silent = True
            self._end_early(leg, CANCELLED)
        elif self._legs.is_new(leg_id):
            self._legs.end(leg_id)

    def end_stream(self, stream: Outbox) -> None:
        """Ends all legs of a router that is gone."""
        for leg in self._legs:
            if leg.stream is stream:
                with self._ending_if_broken(leg):
                    self.cancel(leg.id, stream)

    def expire(self) -> None:
        """Fails the legs whose time is up."""
        for leg in self._legs.expired():
            leg.expires_s = math.inf  # A leg expires once, even if its end fails.
            with self._ending_if_broken(leg):
                leg.fail(worker_pb2.FAILURE_REASON_EXPIRED)
                self._end_early(leg, EXPIRED)

    def fail_all(self, reason: worker_pb2.FailureReason.ValueType) -> None:
        """Fails every leg, because the process ends."""
        for leg in self._legs:
            with self._ending_if_broken(leg):
                leg.fail(reason)
                self._end_early(leg, CANCELLED)

    @contextmanager
    def _ending_if_broken(self, leg: L) -> Iterator[None]:
        """Guards the handling of one leg's event. An exception ends that leg, which would wait for
        ever otherwise. The events behind it still get their turn."""
        try:
            yield
        except Exception:
            logger.exception("an event of a leg broke its handler")
            if self._legs.get(leg.id) is leg:
                self._give_up(leg)

    def _give_up(self, leg: L) -> None:
        leg.fail(worker_pb2.FAILURE_REASON_INTERNAL)
        try:
            self._end_early(leg, FailureReason.INTERNAL.value)
        except Exception:
            logger.exception("a leg could not be ended")

    @abstractmethod
    def _end_early(self, leg: L, error: str = "") -> None:
        """Ends a leg in any state. `error` is the word for its spans, empty if all went well."""
