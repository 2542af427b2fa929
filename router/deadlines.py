"""Bounds on time around what a call waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from router import errors


@asynccontextmanager
async def until(deadline_ns: int, tokens_sent: Callable[[], int]) -> AsyncIterator[None]:
    """Around what must be over by the deadline, Unix nanoseconds.

    Raises:
        RouterError: DEADLINE_EXCEEDED, with the tokens that were sent until then.
    """
    try:
        async with asyncio.timeout((deadline_ns - time.time_ns()) / 1e9) as timer:
            yield
    except TimeoutError:
        if timer.expired():
            raise errors.deadline_exceeded(tokens_sent()) from None
        raise
