"""Callers that leave while a message is on its way to them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest
from frontdoor_kit import access_lines

from baton.inference.v1 import inference_pb2 as api
from router.call import Call
from router.doors.grpc_edge import Edge
from router.requests.bounds import BodyShape


class LeavingCaller:
    """A call whose write fails before its task is cancelled."""

    def __init__(self, error: type[Exception]) -> None:
        self.aborted = False
        self._error = error

    def time_remaining(self) -> float | None:
        return None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> None:
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
    caplog.set_level(logging.INFO)
    ends: list[str] = []

    async def method(
        request: api.StreamGenerateRequest, call: Call
    ) -> AsyncGenerator[api.StreamGenerateResponse, None]:
        try:
            yield api.StreamGenerateResponse()
        except GeneratorExit:
            ends.append("left")
            raise

    handler: Any = Edge(BodyShape(list), 600).stream("m", api.StreamGenerateRequest, method)
    caller = LeavingCaller(error)
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_stream(api.StreamGenerateRequest(), caller)
    assert ends == ["left"]
    assert not caller.aborted
    (line,) = access_lines(caplog)
    assert (line["status"], line["reason"]) == ("CANCELLED", "CANCELLED")
    assert len(caplog.records) == 1
