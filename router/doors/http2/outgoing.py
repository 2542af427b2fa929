"""What a connection of the fast door sends, and the room that there is for it.

Bytes for the client leave together, behind the callback in which they came up. So the tokens that a
worker's message has for all calls of a connection are one write. Data of calls goes past `h2`, and
is taken from the windows that it keeps; all else is written by it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from h2.errors import ErrorCodes

from router.doors.http2.frames import ALLOWED_A_FRAME, MOST_FRAME_BYTES, SMALL_BYTES, Allowance

if TYPE_CHECKING:
    from h2.connection import H2Connection
    from h2.stream import H2Stream
    from hpack import HeaderTuple

    from router.doors.http.connections import Connection

MOST_OUT_BYTES: Final = 1 << 16
"""Bytes that calls may write in one turn of the loop, and that may wait for a client to read."""
MOST_UNREAD_BYTES: Final = 1 << 18
"""Bytes that wait for a client beside what flow control allows it: it asks, and does not read."""


class Outgoing:
    """Sends what calls and protocol have to say.

    Args:
        h2: the protocol.
        outer: takes the bytes.
        allowance: of the client, which earns by what it gets.
        unread: is called when too much waits for the client.
    """

    def __init__(
        self,
        h2: H2Connection,
        outer: Connection,
        allowance: Allowance,
        unread: Callable[[], None],
    ) -> None:
        self.is_paused = False
        """Whether the system takes no more bytes for now."""
        self.is_over = False
        """Whether nothing is sent any more."""
        self._h2 = h2
        self._outer = outer
        self._allowance = allowance
        self._unread = unread
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._size = 0
        self._waiters: dict[H2Stream, asyncio.Future[None]] = {}
        """Calls that wait for room, in the order in which they began to."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the system has not taken; more than any bound once the connection closes."""
        return self._size + self._outer.waiting_bytes

    def window(self, stream: H2Stream) -> int:
        """Bytes that a stream may send now, or less than one."""
        if self.is_paused or self.is_over or self._size > MOST_OUT_BYTES:
            return 0
        return min(stream.outbound_flow_control_window, self._h2.outbound_flow_control_window)

    def data(self, stream: H2Stream, frame: bytes, size: int, *, last: bool = True) -> None:
        """Sends a frame of data, of which `size` bytes count for the windows. `last`: a message
        ends with it."""
        stream.outbound_flow_control_window -= size
        self._h2.outbound_flow_control_window -= size
        if last or size >= SMALL_BYTES:
            self._allowance.earn(ALLOWED_A_FRAME)
        self.send(frame)

    def headers(self, stream_id: int, headers: list[HeaderTuple], *, last: bool) -> None:
        """Sends the begin of an answer, or its end. Behind that, a client that still sends its
        request may stop."""
        self._allowance.earn(ALLOWED_A_FRAME)
        self._h2.send_headers(stream_id, headers, end_stream=last)
        stream = self._h2.streams.get(stream_id)
        if last and stream is not None and not stream.closed:
            self._h2.reset_stream(stream_id, ErrorCodes.NO_ERROR)
        self.tell()

    def reset(self, stream_id: int, code: ErrorCodes) -> None:
        """Ends a stream without an answer."""
        self._h2.reset_stream(stream_id, code)
        self.tell()

    async def room(self, stream: H2Stream) -> None:
        """Returns when a stream may have more room than before. Call `wake` when it has sent."""
        waiter = self._waiters[stream] = self._loop.create_future()
        try:
            await waiter
        finally:
            del self._waiters[stream]

    def wake(self) -> None:
        """Lets calls go on that wait for room: as many as the windows have some for, since a client
        may open them by one byte a time."""
        room = self._h2.outbound_flow_control_window
        for stream, waiter in self._waiters.items():
            if room <= 0:
                return
            if (own := self.window(stream)) > 0:
                room -= min(own, MOST_FRAME_BYTES)
                if not waiter.done():
                    waiter.set_result(None)

    def tell(self) -> None:
        """Sends what `h2` has to say. It must not pass data by, so call it behind each act."""
        if data := self._h2.data_to_send():
            self.send(data)

    def send(self, data: bytes) -> None:
        """Sends bytes at the end of this turn of the loop."""
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._size += len(data)

    def flush(self) -> None:
        """Hands over what was sent."""
        data, self._parts, self._size = b"".join(self._parts), [], 0
        if not data or self._outer.waiting_bytes == sys.maxsize:
            return
        self._outer.write(data)
        self.wake()
        if MOST_UNREAD_BYTES < self._outer.waiting_bytes < sys.maxsize:
            self._unread()
