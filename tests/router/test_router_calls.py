"""Callers that leave while a message is on its way to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest

from baton.inference.v1 import inference_pb2 as api
from router.calls import Call, stream_method


class LeavingCaller:
    """A call whose write fails before its task is cancelled."""

    def __init__(self, error: type[Exception]) -> None:
        self.aborted = False
        self._error = error

    def time_remaining(self) -> float | None:
        return None

    async def write(self, message: Any) -> None:
        raise self._error

    async def abort(self, *status: Any) -> NoReturn:
        self.aborted = True
        raise grpc.aio.AbortError


@pytest.mark.parametrize("error", [grpc.aio.InternalError, grpc.aio.UsageError])
async def test_a_write_that_nobody_takes_is_a_cancellation(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[str] = []

    async def method(
        request: api.StreamGenerateRequest, call: Call
    ) -> AsyncGenerator[api.StreamGenerateResponse, None]:
        try:
            yield api.StreamGenerateResponse()
        except GeneratorExit:
            ends.append("left")
            raise

    handler: Any = stream_method(api.StreamGenerateRequest, method)
    caller = LeavingCaller(error)
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_stream(api.StreamGenerateRequest(), caller)
    assert ends == ["left"]
    assert not caller.aborted
    assert not caplog.records
