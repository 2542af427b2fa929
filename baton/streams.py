"""Running generations, read delta by delta, blocking or awaited.

A stream is open until it is read to its end, closed, or its `with` block is left: the last two
cancel the generation. What it is made of are the API's events, wherever they come from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Self

import grpc

from baton.errors import BatonError, from_rpc_error
from baton.generation import Delta, Gathering, Generation
from baton.inference.v1 import inference_pb2 as pb


@contextmanager
def typed_errors() -> Iterator[None]:
    """What a call raises comes out as a `BatonError`."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


class _Stream:
    """What a stream knows of its generation."""

    def __init__(self, cancel: Callable[[], object], choices: int) -> None:
        self._cancel = cancel
        self._gathering = Gathering(choices)
        self._result: Generation | None = None

    @property
    def trace_id(self) -> str:
        """Of the request's spans; "" before the first delta."""
        return self._gathering.trace_id

    @property
    def result(self) -> Generation:
        """The whole generation, once the stream was read to its end.

        Raises:
            RuntimeError: it was not.
        """
        if self._result is None:
            raise RuntimeError("the stream was not read to its end")
        return self._result

    def close(self) -> None:
        """Cancels the generation if it still runs."""
        self._cancel()

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Whatever breaks the stream comes out as a `BatonError` and ends the call."""
        try:
            with typed_errors():
                yield
        except BatonError:
            self.close()
            raise


class GenerationStream(_Stream):
    """A running generation: iterate for its deltas, then read `result`."""

    def __init__(
        self,
        events: Iterator[pb.StreamGenerateResponse],
        cancel: Callable[[], object],
        choices: int,
    ) -> None:
        super().__init__(cancel, choices)
        self._events = events

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        with self._typed_errors():
            for event in self._events:
                if (delta := self._gathering.add(event)) is not None:
                    return delta
            self._result = self._gathering.result()
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncGenerationStream(_Stream):
    """A running generation: iterate for its deltas, then read `result`."""

    def __init__(
        self,
        events: AsyncIterator[pb.StreamGenerateResponse],
        cancel: Callable[[], object],
        choices: int,
    ) -> None:
        super().__init__(cancel, choices)
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        try:
            with self._typed_errors():
                async for event in self._events:
                    if (delta := self._gathering.add(event)) is not None:
                        return delta
                self._result = self._gathering.result()
        except asyncio.CancelledError:
            self.close()  # gRPC does not where its reader was about to begin
            raise
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Nobody can read it any more. gRPC's call and its iterator hold each other, and so would
        live until some garbage collection."""
        self.close()
