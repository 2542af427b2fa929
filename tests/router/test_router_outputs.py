"""What waits for a client, and whom it wakes."""

from __future__ import annotations

import asyncio

import pytest

from baton.inference.v1 import inference_pb2 as api
from router.requests.outputs import Finished, OutputBuffer, TextDelta


def token(index: int) -> TextDelta:
    return TextDelta(0, index, [7 + index], [str(index)], [])


@pytest.mark.parametrize(("whole", "wakes"), [(False, True), (True, False)])
async def test_tokens_wake_nobody_who_wants_the_answer_whole(whole: bool, wakes: bool) -> None:
    outbox = OutputBuffer(100, whole=whole)
    reading = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    for index in range(3):
        outbox.put(token(index))
    for _ in range(3):
        await asyncio.sleep(0)
    assert reading.done() is wakes
    outbox.put(Finished(0, api.FINISH_REASON_LENGTH))
    assert await reading == TextDelta(0, 0, [7, 8, 9], ["0", "1", "2"], [])
    assert isinstance(await outbox.take(), Finished)
