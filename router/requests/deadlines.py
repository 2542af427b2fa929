"""Bounds on time around what a call waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from router import errors
from router.requests.bounds import UNREAD_GRACE_S


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


class UnreadError(Exception):
    """Long after its deadline, an answer, or the error in its place, was not read."""


@asynccontextmanager
async def read_by(deadline_s: float) -> AsyncIterator[None]:
    """Around all that is sent to a client: its deadline ends the work, but not a client that takes
    nothing of what it gave.

    Args:
        deadline_s: from now.

    Raises:
        UnreadError: `UNREAD_GRACE_S` after the deadline.
    """
    try:
        async with asyncio.timeout(deadline_s + UNREAD_GRACE_S) as timer:
            yield
    except TimeoutError:
        if timer.expired():
            raise UnreadError from None
        raise
