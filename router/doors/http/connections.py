"""The connections of an HTTP port: their number, and their time without a request.

Those of the fast door are here, too, with its protocol in uvicorn's place (`router.doors.http2`).

Life of a connection:

1. Open and *waiting*. Where the port speaks TLS, the handshake comes first. The connection is
   closed if its headers are not complete in time. The time runs from the opening, and later from
   the first byte. Any byte counts, since it may belong to the rest of a body that nobody wants.
   uvicorn closes connections that are silent after an answer.
2. Served, once the headers of a request are there.
3. Waiting again, once the answer is out.
4. Closed. A client may close its own side before: see `router.doors.half_closed`.

At the bound on their number, a new connection replaces the one that has waited longest. If none is
waiting, the new one is closed.

`Connections.protocol` stands between uvicorn's protocol and the socket and sees bytes.
`Connections.around` stands between uvicorn and the application and sees requests.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from baton.tls import reason_of
from router.doors.closing import close
from router.doors.half_closed import HalfClosed, awaited
from router.requests.bounds import HEADERS_S, MOST_UNWANTED_BYTES, TURN_BYTES

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_STATE: Final = "baton.connection"
"""Key in the state of a request's scope. uvicorn copies the state for each request."""


class Connections:
    """The connections of one port. Belongs to the event loop.

    Args:
        most: the most connections that may be open.
        tls: encrypts them; None: they are in clear.
    """

    def __init__(self, most: int, tls: ssl.SSLContext | None = None) -> None:
        self._most = most
        self.tls = tls
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Waiting connections, in the order in which their wait began."""

    def protocol(self, *, app_state: dict[str, Any], **options: Any) -> asyncio.Protocol:
        """Makes a connection. uvicorn calls this as if it were its protocol class."""
        connection = Connection(self)
        state = {**app_state, _STATE: connection}
        connection.inner = AutoHTTPProtocol(app_state=state, **options)  # type: ignore[call-arg]
        return connection

    def around(self, application: ASGIApp) -> ASGIApp:
        """Wraps the application, so that a connection counts as busy during its requests."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            connection = connection_of(scope)
            connection.begin_request()
            try:
                await application(scope, receive, _closing(send) if _has_two_ends(scope) else send)
            finally:
                connection.end_request()

        return watched

    def opened(self, connection: Connection) -> bool:
        """Adds a connection; returns False if there is no place for it, even by closing another."""
        if len(self._open) >= self._most:
            if not self._waiting:
                return False
            next(iter(self._waiting)).abort()
        self._open.add(connection)
        return True

    def closed(self, connection: Connection) -> None:
        """The connection is gone, or about to be."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def waits(self, connection: Connection) -> None:
        """The connection has no request now."""
        if connection in self._open:
            self._waiting[connection] = None

    def serves(self, connection: Connection) -> None:
        """The connection has a request now."""
        self._waiting.pop(connection, None)


def _has_two_ends(scope: Scope) -> bool:
    """Whether a request says its length in two ways. A proxy in front may have taken the other one,
    and what it takes for the next request may be a part of this: so no other may follow (RFC 9112,
    6.1)."""
    names = {name for name, _ in scope.get("headers", ())}
    return {b"content-length", b"transfer-encoding"} <= names


def _closing(send: Send) -> Send:
    """Says in the answer that it is the connection's last."""

    async def last(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            message = {**message, "headers": headers}
        await send(message)

    return last


class Connection(asyncio.Protocol):
    """One connection. `Connections.protocol` makes it."""

    inner: asyncio.Protocol
    """uvicorn's protocol."""
    filler = b""
    """A chunk that means nothing, while a stream is answered."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        """None before it is open, and if it was turned away."""
        self._requests = 0
        """Requests in progress. There are two if the second is read before the first is cleaned
        up."""
        self._is_settled = False
        self._unwanted_bytes = 0
        """Bytes that came since the last answer."""
        self._unread = bytearray()
        """Bytes that wait for their turn. The socket is not read meanwhile."""
        self._wanted = True
        """Whether uvicorn takes more bytes."""
        self._is_due = False
        """Set while the next turn is scheduled."""
        self._timer: asyncio.TimerHandle | None = None
        self._greeted = False
        """uvicorn knows of the connection."""
        self._handshake: asyncio.Task[None] | None = None
        self._half_closed: HalfClosed | None = None
        self._is_lost = False
        self._when_lost: Callable[[], None] | None = None
        self._held: list[bytes] | None = None
        """What was written in a block of `together`; None outside of one."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection opens."""
        opened = cast("asyncio.Transport", transport)
        if not self._connections.opened(self):
            opened.abort()
            return
        self._transport = opened
        self._connections.waits(self)
        self._expect_headers()
        if self._connections.tls is None:
            self._greet(opened)
        else:
            start = asyncio.get_running_loop().start_tls
            encrypting = start(opened, self, self._connections.tls, server_side=True)
            self._handshake = asyncio.create_task(self._encrypt(_begun(encrypting)))

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._transport is None:
            return
        if not self._requests and not self._is_settled:
            self._unwanted_bytes += len(data)
            if self._unwanted_bytes > MOST_UNWANTED_BYTES:
                self.abort()
                return
            self._expect_headers()
        self._unread += data
        if self._greeted and not self._is_due:
            self._take_turn()

    @property
    def waiting_bytes(self) -> int:
        """Bytes written that the system has not taken; more than any bound once it closes."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return sys.maxsize
        return transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Writes for uvicorn, or past it in the midst of a chunked answer."""
        assert self._transport is not None
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that writes several parts: they leave at its end as one, with one call of the
        system. A block in another belongs to it."""
        is_outer = self._held is None
        self._held = self._held or []
        try:
            yield
        finally:
            if is_outer:
                self.let_go()

    def let_go(self) -> None:
        """Writes what is held."""
        held, self._held = self._held, None
        if held:
            self.write(b"".join(held))

    def when_lost(self, act: Callable[[], None] | None) -> None:
        """Calls `act` when the client has left, at once if it has; None: nothing is called."""
        self._when_lost = act
        if act is not None and self._is_lost:
            act()

    def settle(self) -> None:
        """The protocol inside watches it from now on, also between requests: HTTP/2 has more to
        say than requests."""
        self._is_settled = True
        self._stop_timer()

    def begin_request(self) -> None:
        """The headers of a request are there."""
        self._requests += 1
        self._stop_timer()
        self._connections.serves(self)

    def end_request(self) -> None:
        """The application has finished a request."""
        self._requests -= 1
        if not self._requests:
            self._unwanted_bytes = 0
            self._connections.waits(self)
            if self._half_closed is not None:
                self._half_closed.close_if_answered()

    def abort(self) -> None:
        """Closes it at once, and drops unsent data."""
        self._connections.closed(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._stop_timer()
        self._connections.closed(self)
        if self._greeted:
            self.inner.connection_lost(exc)
        self._is_lost = True
        if self._when_lost is not None:
            self._when_lost()

    def eof_received(self) -> bool | None:
        """The client sends no more bytes. True: the connection stays until it has its answer."""
        if not self._greeted or self._transport is None:
            return None
        if rest := bytes(self._unread):
            self._unread.clear()
            self.inner.data_received(rest)
        is_in_clear = self._connections.tls is None
        if is_in_clear and not self._half_closed and (cycle := awaited(self.inner)):
            self._half_closed = HalfClosed(self._transport, cycle, self.write, lambda: self.filler)
        return True if self._half_closed else self.inner.eof_received()

    def pause_writing(self) -> None:
        """The client reads more slowly than the router writes."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        self.inner.resume_writing()

    def want(self, is_more: bool) -> None:
        """Notes whether uvicorn takes more bytes from now on."""
        self._wanted = is_more
        self._arrange()

    async def _encrypt(self, encrypting: Awaitable[asyncio.Transport | None]) -> None:
        """Shakes hands. The timer for the headers bounds that, too."""
        try:
            encrypted = await encrypting
        except (OSError, asyncio.CancelledError) as error:
            why = reason_of(error) if isinstance(error, ssl.SSLError) else "it was closed"
            logger.debug("a TLS handshake failed: %s", why)
            self.abort()
            return
        if encrypted is None or encrypted.is_closing():
            self.abort()
            return
        self._transport = encrypted
        self._greet(encrypted)

    def _greet(self, opened: asyncio.Transport) -> None:
        """Hands the connection to uvicorn."""
        self._greeted = True
        self.inner.connection_made(cast("asyncio.Transport", _Socket(opened, self)))
        if self._unread:  # The client's first words came right behind its handshake.
            self._take_turn()

    def _take_turn(self) -> None:
        """Gives uvicorn a few bytes, and the rest in later turns of the event loop. A body of tiny
        chunks costs a hundred times as much as its bytes."""
        self._is_due = False
        if self._transport is None or self._transport.is_closing():
            return
        if self._wanted and (received := bytes(self._unread[:TURN_BYTES])):
            del self._unread[:TURN_BYTES]
            self.inner.data_received(received)
        self._arrange()

    def _arrange(self) -> None:
        """Schedules the next turn if bytes wait, else reads from the socket again."""
        if self._transport is None or self._transport.is_closing() or self._half_closed:
            return
        if self._wanted and not self._unread:
            self._transport.resume_reading()
            return
        self._transport.pause_reading()
        if self._wanted and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _expect_headers(self) -> None:
        """Starts the timer for a request's headers, at the opening or at the first byte."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HEADERS_S, self.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _begun(work: Coroutine[Any, Any, Result]) -> Awaitable[Result]:
    """Runs a coroutine up to its first wait, now, and returns the rest.

    `start_tls` puts its own protocol on the transport before it waits. That must be done before the
    first bytes come, and uvloop cannot pause a transport that has just been made.
    """
    first = work.send(None)

    @types.coroutine
    def rest() -> Generator[Any, Any, Result]:
        yield first
        return (yield from work)  # type: ignore[no-any-return]

    return rest()


class _Socket:
    """The transport that uvicorn sees. The connection decides when to read from the socket.

    All other calls go to the socket's transport.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection

    def pause_reading(self) -> None:
        """uvicorn takes no more bytes."""
        self._connection.want(False)

    def resume_reading(self) -> None:
        """uvicorn takes bytes again."""
        self._connection.want(True)

    def write(self, data: bytes) -> None:
        """uvicorn writes a part of an answer."""
        self._connection.write(data)

    def close(self) -> None:
        """uvicorn has written an answer that is the last."""
        self._connection.let_go()
        close(self._transport)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def connection_of(scope: Scope) -> Connection:
    """The connection of a request."""
    return cast("Connection", scope["state"][_STATE])
