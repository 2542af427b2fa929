"""Streams of a running generation: the caller reads them delta by delta, blocking or awaited.

A stream is open until it is read to its end, closed, or its `with` block is left. The last two
cancel the generation. A stream reads the events of the API from any source.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Self

import grpc

from baton.client.generation import Delta, Gathering, Generation
from baton.errors import BatonError, from_rpc_error
from baton.inference.v1 import inference_pb2 as pb


@contextmanager
def typed_errors() -> Iterator[None]:
    """Converts the error of a call to a `BatonError`."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


class _Stream:
    """The parts that both kinds of streams share."""

    def __init__(self, cancel: Callable[[], object], choices: int) -> None:
        self._cancel = cancel
        self._gathering = Gathering(choices)
        self._result: Generation | None = None

    @property
    def trace_id(self) -> str:
        """Trace id of the request; "" before the first delta."""
        return self._gathering.trace_id

    @property
    def result(self) -> Generation:
        """The whole generation, after the stream was read to its end.

        Raises:
            RuntimeError: the stream was not read to its end.
        """
        if self._result is None:
            raise RuntimeError("the stream was not read to its end")
        return self._result

    def close(self) -> None:
        """Cancels the generation if it still runs."""
        self._cancel()

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Converts errors to a `BatonError`. An error ends the call."""
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
            self.close()  # gRPC does not if the reader had not begun.
            raise
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Closes a dropped stream. gRPC's call and its iterator refer to each other: they would
        live until the next garbage collection."""
        self.close()
