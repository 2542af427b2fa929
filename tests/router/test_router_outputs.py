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


async def test_tokens_leave_together_when_their_time_has_come() -> None:
    outbox, now_s = OutputBuffer(100, min_message_s=0.05), asyncio.get_running_loop().time
    outbox.put(token(0))
    assert await outbox.take() == token(0)  # The first one waits for nobody.
    began_s = now_s()
    reading = asyncio.create_task(outbox.take())
    for index in (1, 2, 3):
        await asyncio.sleep(0.005)
        outbox.put(token(index))
        assert not reading.done()
    assert await reading == TextDelta(0, 1, [8, 9, 10], ["1", "2", "3"], [])
    assert now_s() - began_s > 0.04


@pytest.mark.parametrize("closed", [False, True])
async def test_an_end_lets_the_tokens_before_it_leave(closed: bool) -> None:
    outbox = OutputBuffer(100, min_message_s=60.0)
    outbox.put(token(0))
    await outbox.take()
    outbox.put(token(1))
    reading = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not reading.done()
    if closed:
        outbox.close()
    else:
        outbox.put(Finished(0, api.FINISH_REASON_LENGTH))
    assert await asyncio.wait_for(reading, 5) == token(1)
    rest = await asyncio.wait_for(outbox.take(), 5)
    assert rest is None if closed else isinstance(rest, Finished)


async def test_a_reader_that_comes_early_is_woken() -> None:
    """Its tokens were there before, and no other follows."""
    outbox = OutputBuffer(100, min_message_s=0.02)
    outbox.put(token(0))
    await outbox.take()
    outbox.put(token(1))
    assert await asyncio.wait_for(outbox.take(), 5) == token(1)
