"""Reading the bodies of HTTP requests: no larger, slower or more of them than a router can hold.

Life of a body: announced or chunked -> read, its bytes counted as they come, against its own bound
and against that of all bodies together -> judged by its shape -> taken by the method, which makes
objects of it -> let go, when its bytes no longer count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from router import errors
from router.requests.bounds import BODY_BYTES_A_SECOND, BODY_GRACE_S, MOST_HELD_BODY_BYTES

if TYPE_CHECKING:
    from starlette.requests import Request

    from router.requests.bounds import BodyShape


class Bodies:
    """All bodies that a router holds. Belongs to the event loop.

    Args:
        shape: judges each.
    """

    def __init__(self, shape: BodyShape) -> None:
        self._shape = shape
        self._held_bytes = 0

    @contextmanager
    def one(self) -> Iterator[Body]:
        """A body, which is let go at the end at the latest."""
        body = Body(self, self._shape)
        try:
            yield body
        finally:
            body.let_go()

    def hold(self, size_bytes: int) -> None:
        """Counts bytes that came; fewer than none where they were let go.

        Raises:
            RouterError: ROUTER_BUSY.
        """
        if size_bytes > 0 and self._held_bytes + size_bytes > MOST_HELD_BODY_BYTES:
            raise errors.router_busy(self._held_bytes)
        self._held_bytes += size_bytes


class Body:
    """One of them. `Bodies.one` makes it."""

    def __init__(self, bodies: Bodies, shape: BodyShape) -> None:
        self._bodies = bodies
        self._shape = shape
        self._parts: list[bytes] = []
        self._size_bytes = 0

    async def read(self, request: Request) -> None:
        """Reads all of it.

        Raises:
            ClientDisconnect: the client left before its end.
            RouterError: MALFORMED_REQUEST, it is too large or of an impossible shape;
                DEADLINE_EXCEEDED, it came too slowly; ROUTER_BUSY, others fill the router.
        """
        self._shape.check_size(_announced(request))
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(began_s + BODY_GRACE_S) as timer:
                async for part in request.stream():
                    self._add(part)
                    pace_s = self._size_bytes / BODY_BYTES_A_SECOND
                    timer.reschedule(began_s + BODY_GRACE_S + pace_s)
        except TimeoutError:
            raise errors.deadline_exceeded(tokens_sent=0) from None
        self._parts = [b"".join(self._parts)]
        self._shape.check_json(self._parts[0])

    def take(self) -> bytes:
        """All of it, once. It counts until it is let go."""
        return self._parts.pop()

    def let_go(self) -> None:
        """It is no longer held."""
        self._parts.clear()
        self._bodies.hold(-self._size_bytes)
        self._size_bytes = 0

    def _add(self, part: bytes) -> None:
        self._shape.check_size(self._size_bytes + len(part))
        self._bodies.hold(len(part))
        self._size_bytes += len(part)
        self._parts.append(part)


def _announced(request: Request) -> int:
    """The size that the client tells; 0 where it tells none."""
    told = request.headers.get("content-length", "")
    return int(told) if told.isdecimal() else 0
