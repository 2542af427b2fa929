"""Reads the bodies of requests over HTTP, with bounds on their size, speed and total.

Life of a body:

1. Announced or chunked.
2. Read. Its bytes are counted as they come, against its own bound and that of all bodies together.
3. Checked for its shape.
4. Taken by the method, which parses it.
5. Let go. Its bytes count no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from grpc import StatusCode

from router import errors
from router.errors import RouterError
from router.requests.bounds import MOST_HELD_BODY_BYTES, body_s

if TYPE_CHECKING:
    from starlette.requests import Request

    from router.requests.bounds import BodyShape


class Bodies:
    """All bodies that a router holds. Belongs to the event loop.

    Args:
        shape: checks each body.
    """

    def __init__(self, shape: BodyShape) -> None:
        self._shape = shape
        self._held_bytes = 0

    @contextmanager
    def one(self) -> Iterator[Body]:
        """A body. It is let go at the end at the latest."""
        body = Body(self, self._shape)
        try:
            yield body
        finally:
            body.let_go()

    def hold(self, size_bytes: int) -> None:
        """Counts bytes that came. The number is negative for bytes that are let go.

        Raises:
            RouterError: ROUTER_BUSY.
        """
        if size_bytes > 0 and self._held_bytes + size_bytes > MOST_HELD_BODY_BYTES:
            raise errors.router_busy(self._held_bytes)
        self._held_bytes += size_bytes


class Body:
    """The body of one request. `Bodies.one` makes it."""

    def __init__(self, bodies: Bodies, shape: BodyShape) -> None:
        self._bodies = bodies
        self._shape = shape
        self._parts: list[bytes] = []
        self._size_bytes = 0

    async def read(self, request: Request) -> None:
        """Reads all of it.

        Raises:
            ClientDisconnect: the client left before its end.
            RouterError: UNSUPPORTED_ENCODING, it is compressed;
                MALFORMED_REQUEST, it is no JSON, too large or has an impossible shape;
                DEADLINE_EXCEEDED, it came too slowly; ROUTER_BUSY, other bodies fill the budget.
        """
        _check_encoding(request)
        _check_type(request)
        self.expect(_announced(request))
        async with paced() as came:
            async for part in request.stream():
                self.add(part)
                came(len(part))
        self._parts = [b"".join(self._parts)]
        self._shape.check_json(self._parts[0])

    def take(self) -> bytes:
        """The whole body. Call it once. The bytes count until it is let go."""
        whole = b"".join(self._parts)
        self._parts.clear()
        return whole

    def let_go(self) -> None:
        """Drops the body, so that its bytes count no longer."""
        self._parts.clear()
        self._bodies.hold(-self._size_bytes)
        self._size_bytes = 0

    def expect(self, size_bytes: int) -> None:
        """A size is announced.

        Raises:
            RouterError: MALFORMED_REQUEST, it is larger than any prompt.
        """
        self._shape.check_size(size_bytes)

    def add(self, part: bytes) -> None:
        """A part came.

        Raises:
            RouterError: MALFORMED_REQUEST, it is too large now; ROUTER_BUSY, other bodies fill the
                budget.
        """
        self._shape.check_size(self._size_bytes + len(part))
        self._bodies.hold(len(part))
        self._size_bytes += len(part)
        self._parts.append(part)


@asynccontextmanager
async def paced() -> AsyncIterator[Callable[[int], None]]:
    """A block that reads a body, and says of each part how many bytes came.

    Raises:
        RouterError: DEADLINE_EXCEEDED, they came too slowly.
    """
    began_s, size = asyncio.get_running_loop().time(), 0
    try:
        async with asyncio.timeout_at(began_s + body_s(0)) as timer:

            def came(count: int) -> None:
                nonlocal size
                size += count
                timer.reschedule(began_s + body_s(size))

            yield came
    except TimeoutError:
        raise errors.deadline_exceeded(tokens_sent=0) from None


def _check_type(request: Request) -> None:
    """Web pages may send other types to any address, without asking first; see `origins`."""
    header = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if header != "application/json" and not header.endswith("+json"):
        raise errors.malformed_request("the content type must be application/json")


def unsupported_encoding() -> RouterError:
    """The body is compressed. A few of its bytes could stand for megabytes."""
    message = "bodies must not be compressed: leave out content-encoding"
    return RouterError(StatusCode.UNIMPLEMENTED, "UNSUPPORTED_ENCODING", message)


def _check_encoding(request: Request) -> None:
    header = ",".join(request.headers.getlist("content-encoding"))
    if any(one.strip().lower() not in ("", "identity") for one in header.split(",")):
        raise unsupported_encoding()


def _announced(request: Request) -> int:
    """The size that the client announced; 0 if it announced none."""
    header = request.headers.get("content-length", "")
    return int(header) if header.isdecimal() else 0
