"""Brings events and errors of a generation in this process to the caller's thread."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent import futures
from contextlib import aclosing, contextmanager
from queue import SimpleQueue
from typing import Self

from baton.errors import from_status
from baton.inference.v1 import inference_pb2 as pb
from engine.engine import Engine, EngineError
from local.loop_thread import LoopThread
from router import errors
from router.call import Call
from router.doors.frontdoor import InferenceService

Waiting = SimpleQueue[pb.StreamGenerateResponse | None]


class Events:
    """Iterates over the events of a stream as they come. Dropping it cancels the generation."""

    def __init__(
        self,
        loop: LoopThread,
        service: InferenceService,
        request: pb.StreamGenerateRequest,
        call: Call,
        engine: Engine,
        keeps: object,
    ) -> None:
        """Starts the generation. It holds a reference to `keeps`."""
        self._keeps = keeps
        self._waiting: Waiting = SimpleQueue()
        waiting = self._waiting
        self._feeding = loop.submit(_feed(service, request, call, engine, waiting))
        self._feeding.add_done_callback(lambda _: waiting.put(None))
        weakref.finalize(self, self._feeding.cancel)

    def cancel(self) -> None:
        """Cancels the generation if it still runs."""
        self._feeding.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pb.StreamGenerateResponse:
        if (event := self._waiting.get()) is not None:
            return event
        self._waiting.put(None)  # Further calls find the end, too.
        with typed_cancellation():
            self._feeding.result()
        raise StopIteration


async def _feed(
    service: InferenceService,
    request: pb.StreamGenerateRequest,
    call: Call,
    engine: Engine,
    waiting: Waiting,
) -> None:
    with typed_errors(call, engine):
        async with aclosing(service.stream_generate(request, call)) as events:
            async for event in events:
                waiting.put(event)


@contextmanager
def typed_errors(call: Call, engine: Engine) -> Iterator[None]:
    """Converts a front door's error to a `BatonError`. A bug becomes its cause. If the engine has
    lost a rank, that is the error."""
    try:
        yield
    except Exception as error:
        if engine.lost:
            raise EngineError(engine.lost) from error
        described = errors.describe(error, call.id)
        cause = None if described is error else error
        raise from_status(errors.to_status(described, call.id)) from cause


@contextmanager
def typed_cancellation() -> Iterator[None]:
    """Converts a cancellation to a `BatonError`."""
    try:
        yield
    except futures.CancelledError:
        raise from_status(errors.to_status(errors.cancelled())) from None
