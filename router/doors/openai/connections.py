"""The connections of an HTTP port: how many there may be, and how long one may wait to ask.

Life of a connection: open and *waiting* -> the headers of a request are there, and it is served ->
the answer is out, and it is waiting again -> closed. One that waits is closed where the headers of
a new connection, or those behind a first byte, are not there in time; what is sent to it counts,
too, since it may be the rest of a body that nobody wants. uvicorn closes those that are silent
after an answer. At the bound, who has waited longest makes room for who comes; and who comes is
turned away where nobody waits.

`Connections.protocol` stands between uvicorn's protocol and the socket, `Connections.around`
between uvicorn and the application: the first sees bytes, the second requests.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from router.requests.bounds import HEADERS_S, MOST_UNWANTED_BYTES, TURN_BYTES

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_STATE: Final = "baton.connection"
"""Key in the state of a request's scope, which uvicorn copies for each request."""


class Connections:
    """Those of one port. Belongs to the event loop.

    Args:
        most: that may be open.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """In the order in which they began to."""

    def protocol(self, *, app_state: dict[str, Any], **options: Any) -> asyncio.Protocol:
        """What uvicorn takes for the class of its protocol."""
        connection = Connection(self)
        state = {**app_state, _STATE: connection}
        connection.inner = AutoHTTPProtocol(app_state=state, **options)  # type: ignore[call-arg]
        return connection

    def around(self, application: ASGIApp) -> ASGIApp:
        """The application, around whose requests connections are known to be busy."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            connection = connection_of(scope)
            connection.begin_request()
            try:
                await application(scope, receive, send)
            finally:
                connection.end_request()

        return watched

    def opened(self, connection: Connection) -> bool:
        """Whether there is room for one more, or could be made."""
        if len(self._open) >= self._most:
            if not self._waiting:
                return False
            next(iter(self._waiting)).abort()
        self._open.add(connection)
        return True

    def closed(self, connection: Connection) -> None:
        """It is gone, or as good as gone."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        """It has no request now."""
        if connection in self._open:
            self._waiting[connection] = None

    def serves(self, connection: Connection) -> None:
        """It has one."""
        self._waiting.pop(connection, None)


class Connection(asyncio.Protocol):
    """One of them. `Connections.protocol` makes it."""

    inner: asyncio.Protocol
    """uvicorn's."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        """None before it is open, and where it was turned away."""
        self._requests = 0
        """Being served: two, where the second is read while the first is tidied up."""
        self._unwanted_bytes = 0
        """Came since the last answer."""
        self._unread = bytearray()
        """Came, and waits for its turn. Nothing more is taken from the socket meanwhile."""
        self._wanted = True
        """uvicorn takes more."""
        self._is_due = False
        """Set while the next turn is on its way."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It opens."""
        opened = cast("asyncio.Transport", transport)
        if not self._connections.opened(self):
            opened.abort()
            return
        self._transport = opened
        self.inner.connection_made(cast("asyncio.Transport", _Socket(opened, self)))
        self._connections.waits(self)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._transport is None:
            return
        if not self._requests:
            self._unwanted_bytes += len(data)
            if self._unwanted_bytes > MOST_UNWANTED_BYTES:
                self.abort()
                return
            self._expect_headers()
        self._unread += data
        if not self._is_due:
            self._take_turn()

    def begin_request(self) -> None:
        """The headers of a request are there."""
        self._requests += 1
        self._stop_timer()
        self._connections.serves(self)

    def end_request(self) -> None:
        """The application has done with a request."""
        self._requests -= 1
        if not self._requests:
            self._unwanted_bytes = 0
            self._connections.waits(self)

    def abort(self) -> None:
        """Closes it at once, whatever is on its way."""
        self._connections.closed(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        self._stop_timer()
        self._connections.closed(self)
        if self._transport is not None:
            self.inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """The client sends nothing more."""
        if self._transport is None:
            return None
        if rest := bytes(self._unread):
            self._unread.clear()
            self.inner.data_received(rest)
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        """The client reads more slowly than is written."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        self.inner.resume_writing()

    def want(self, is_more: bool) -> None:
        """uvicorn takes more from now on, or no more."""
        self._wanted = is_more
        self._arrange()

    def _take_turn(self) -> None:
        """Has uvicorn read a little, and the rest in later turns of the event loop: a body of tiny
        chunks costs a hundred times what its bytes do."""
        self._is_due = False
        if self._transport is None or self._transport.is_closing():
            return
        if self._wanted and (piece := bytes(self._unread[:TURN_BYTES])):
            del self._unread[:TURN_BYTES]
            self.inner.data_received(piece)
        self._arrange()

    def _arrange(self) -> None:
        """Asks for the next turn where something waits for it, and else for more to come."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._wanted and not self._unread:
            self._transport.resume_reading()
            return
        self._transport.pause_reading()
        if self._wanted and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _expect_headers(self) -> None:
        """All of a request's headers come within a time of the first byte, or of the opening."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HEADERS_S, self.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Socket:
    """What uvicorn takes for the socket's transport: whether to read from it, the connection says.

    Everything else goes to the transport itself.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection

    def pause_reading(self) -> None:
        """No more."""
        self._connection.want(False)

    def resume_reading(self) -> None:
        """More."""
        self._connection.want(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def connection_of(scope: Scope) -> Connection:
    """The connection that a request came over."""
    return cast("Connection", scope["state"][_STATE])
