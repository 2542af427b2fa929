"""Time limits for the waits of a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from router import errors
from router.requests.bounds import UNREAD_GRACE_S

if TYPE_CHECKING:
    from router.call import Call


def deadline_ns(call: Call, longest_s: float) -> int:
    """The caller's deadline, Unix nanoseconds, but not beyond the longest duration allowed."""
    duration_s = longest_s if call.time_left_s is None else min(call.time_left_s, longest_s)
    return call.arrived_ns + int(duration_s * 1e9)


@asynccontextmanager
async def until(deadline_ns: int, tokens_sent: Callable[[], int]) -> AsyncIterator[None]:
    """Wraps work that must end by the deadline, Unix nanoseconds.

    Raises:
        RouterError: DEADLINE_EXCEEDED, with the count of tokens sent by then.
    """
    try:
        async with asyncio.timeout((deadline_ns - time.time_ns()) / 1e9) as timer:
            yield
    except TimeoutError:
        if timer.expired():
            raise errors.deadline_exceeded(tokens_sent()) from None
        raise


class UnreadError(Exception):
    """The client did not read its answer, or the error in its place, long after the deadline."""


@asynccontextmanager
async def read_by(deadline_s: float) -> AsyncIterator[None]:
    """Wraps everything that is sent to a client. The deadline alone would end the work, but not the
    wait for a client that does not read.

    Args:
        deadline_s: time from now to the deadline.

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
