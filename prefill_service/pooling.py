"""What a worker adds to the engine to pool prompts: there is no hand-off, and one answer.

Life of a leg: submitted to the engine -> started -> pooled, failed or ended early. The router hears
of its end once, and the engine has freed its pages by then or is asked to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from baton.worker.v1 import worker_pb2
from engine.pooling.requests import Pooled
from engine.types import Event, EventOfOne, NewTokens, PrefillStarted, RequestFailed, Sink
from worker_base.legs import LegService, WorkerLeg
from worker_base.outbox import LoopInbox, Outbox
from worker_base.pooling import PoolTimes, pooled_message
from worker_base.spans import write_prompt_spans

if TYPE_CHECKING:
    from engine.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class PoolLeg(WorkerLeg):
    """A prompt that is pooled."""


class PoolService(LegService[PoolLeg]):
    """Legs with WORK_MODE_POOL. Everything runs on the event loop, except the sink."""

    def __init__(
        self, engine: Engine, inbox: LoopInbox, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self._engine = engine
        self._inbox = inbox
        self._sink: Sink = self._on_step

    @property
    def active(self) -> int:
        """Legs under way."""
        return len(self._legs)

    def submit(self, submit: worker_pb2.Submit, stream: Outbox) -> None:
        """Takes new work on. It is ignored if its id was here before.

        Raises:
            MalformedMessage: it cannot be run as it is.
        """
        if self._legs.is_new(submit.attempt_id):
            leg = PoolLeg.received(submit, stream, self._legs.clock())
            self._legs.add(leg)
            self._engine.submit(leg.request, self._sink)

    def _on_step(self, events: Sequence[Event]) -> None:
        """The sink, on the step thread."""
        self._inbox.call_on_loop(partial(self._take_events, events))

    def _take_events(self, events: Sequence[Event]) -> None:
        for event in events:
            assert not isinstance(event, NewTokens), "a prompt that is pooled draws nothing"
            if (leg := self._legs.get(event.request_id)) is not None:
                with self._ending_if_broken(leg):
                    self._take_event(leg, event)

    def _take_event(self, leg: PoolLeg, event: EventOfOne) -> None:
        match event:
            case PrefillStarted():
                leg.started_ns = event.at_ns
                leg.cached_tokens = event.cached_tokens
                leg.loaded_tokens = event.loaded_tokens
            case Pooled():
                leg.computed_ns = event.at_ns
                times = PoolTimes(leg.cached_tokens, leg.received_ns, leg.started_ns)
                leg.send(pooled=pooled_message(leg.id, event, times))
                self._end(leg)
            case RequestFailed():
                leg.fail(event.reason, event.hook)
                self._end(leg, event.reason.value)
            case _:
                logger.error("unexpected event: %s", type(event).__qualname__)

    def _end_early(self, leg: PoolLeg, error: str = "") -> None:
        self._engine.cancel(leg.id)
        self._end(leg, error)

    def _end(self, leg: PoolLeg, error: str = "") -> None:
        leg.conclude(error)
        self._legs.end(leg.id)
        computed = len(leg.request.prompt_ids) - leg.cached_tokens if leg.computed_ns else 0
        write_prompt_spans(leg, computed, self._engine.rank_skew_s)
