"""Joins the streams of a request's prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merged(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of all streams as they come, each with its stream's index. Closes all streams.

    At most one item waits here, so that a slow reader slows every stream down.

    Raises:
        Exception: the first exception of a stream.
    """
    if len(streams) == 1:  # The usual case needs no queue.
        async with aclosing(streams[0]) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(1)
    pumps = [asyncio.create_task(_pump(*one, queue)) for one in enumerate(streams)]
    try:
        open_streams = len(pumps)
        while open_streams:
            match await queue.get():
                case None:
                    open_streams -= 1
                case Exception() as error:
                    raise error
                case tagged:
                    yield tagged
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.wait(pumps)


async def _pump(
    index: int,
    stream: AsyncGenerator[Item, None],
    queue: asyncio.Queue[tuple[int, Item] | Exception | None],
) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((index, item))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
