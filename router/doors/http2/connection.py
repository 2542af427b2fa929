"""One connection of the fast door.

Life of a connection:

1. Greeted: the client's first frame of settings came, within the time for headers.
2. Calls begin and end (`call`). While some run, a silent client is pinged.
3. *Leaving*, when it is old, idle, or the door closes: new calls are refused, so that the client
   takes another connection, and those under way go on.
4. Closed, when the last call has ended. What a client does against the protocol, or more often than
   it may, closes the connection at once, and ends its calls.

`h2` keeps the protocol. It sees whole frames that `frames` has let through, and a few of them in
one turn of the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final, Protocol, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import DenialOfServiceError, ProtocolError
from h2.settings import SettingCodes, Settings

from baton.grpc_options import CLIENT_PING_TIMEOUT_MS, KEEPALIVE_INTERVAL_MS
from router.doors.http2 import heads
from router.doors.http2.call import GrpcCall, Service
from router.doors.http2.frames import (
    ALLOWED_A_SECOND,
    ALLOWED_FRAMES,
    MOST_BLOCK_BYTES,
    PREFACE,
    Allowance,
    Frame,
    FrameError,
    FrameReader,
    Kind,
    goaway,
)
from router.doors.http2.outgoing import MOST_OUT_BYTES, Outgoing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from router.doors.http.connections import Connection

logger = logging.getLogger(__name__)

MOST_CALLS: Final = 256
"""Most calls of a connection at once, those included that still end. Each has a task."""
STREAM_WINDOW: Final = 1 << 18
"""Bytes of a request on their way: a quarter of a megabyte for each round trip."""
CONNECTION_WINDOW: Final = 1 << 20
"""Bytes of all requests of a connection on their way."""
FRAMES_A_TURN: Final = 16
"""Frames read in one turn of the loop, half a millisecond."""
TURN_S: Final = 1e-3
"""Time after which a turn reads no further frame: headers may take some milliseconds."""
ALLOWED_RESETS: Final = 2 * MOST_CALLS
"""Calls that a client may begin and drop at once: twice all that it can have."""
RESETS_A_SECOND: Final = 50
"""Such calls a second, in the long run. Each costs about a millisecond."""
PING_S: Final = KEEPALIVE_INTERVAL_MS / 1e3
PING_TIMEOUT_S: Final = CLIENT_PING_TIMEOUT_MS / 1e3
"""As long as clients wait for a router: its own loop answers here, and may be late."""
_PING: Final = b"baton:up"
"""The eight bytes of a ping."""
_DEFAULT_WINDOW: Final = 65_535  # RFC 9113, 6.9.2
_MOST_LIST_BYTES: Final = MOST_BLOCK_BYTES
"""Most bytes of a call's headers out of their compressed form. More end the connection: a header
may be a byte on its way, and takes `h2` some microseconds."""


class _H2(H2Connection):
    """The protocol of a server."""

    MAX_CLOSED_STREAMS = 4 * MOST_CALLS
    """Ended calls that are remembered, for frames that come late. `h2` keeps 65,536, some MB."""


class Owner(Service, Protocol):
    """The part of the door that its connections use (`server`)."""

    idle_s: float
    """After this time without a call a connection leaves."""
    grace_s: float
    """Time for the calls of a connection that leaves."""

    @property
    def age_s(self) -> float:
        """Age at which a connection leaves in any case."""
        ...

    def opened(self, connection: Http2Connection) -> None:
        """A connection is there."""
        ...

    def closed(self, connection: Http2Connection) -> None:
        """It is gone."""
        ...

    def ended(self, why: str) -> None:
        """The door ended a connection; `why` is a short stable word."""
        ...


class Http2Connection(asyncio.Protocol):
    """Speaks HTTP/2 with one client.

    Args:
        outer: between this and the socket.
        owner: the door.
    """

    def __init__(self, outer: Connection, owner: Owner) -> None:
        self.outer = outer
        self.owner = owner
        self._loop = loop = asyncio.get_running_loop()
        self.peer = ""
        """The other end, as gRPC writes it."""
        self.calls: dict[int, GrpcCall] = {}
        """Calls whose tasks run, by the numbers of their streams."""
        self.leaving = False
        # `h2` would end all calls for a space behind a value, which gRPC's clients may send.
        config = H2Configuration(
            client_side=False, header_encoding=None, validate_inbound_headers=False
        )
        self._h2 = _H2(config)
        self._allowance = Allowance(ALLOWED_FRAMES, ALLOWED_A_SECOND, loop.time)
        self._resets = Allowance(ALLOWED_RESETS, RESETS_A_SECOND, loop.time)
        self._reader = FrameReader(self._allowance)
        self._transport: asyncio.Transport | None = None
        self._is_greeted = False
        self.out = Outgoing(self._h2, outer, self._allowance, self._unread)
        self._timer: asyncio.TimerHandle | None = None
        self._heard_s = self._quiet_s = loop.time()
        self._old_s = loop.time() + owner.age_s
        self._left_s = 0.0
        self._pinged_s: float | None = None
        """When the ping left that has no answer yet."""

    # What comes from the client.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection opens."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(MOST_OUT_BYTES)
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]
        self.peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        h2 = self._h2
        h2.local_settings = _settings(MOST_CALLS)
        h2.initiate_connection()
        # `h2` would close a connection with a call too many. Ours refuses the call.
        h2.local_settings = _settings(2 * MOST_CALLS)
        h2.decoder.max_header_list_size = _MOST_LIST_BYTES
        h2.increment_flow_control_window(CONNECTION_WINDOW - _DEFAULT_WINDOW)
        h2.receive_data(PREFACE)
        self.out.tell()
        self._look_in(self.owner.idle_s)
        self.owner.opened(self)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self.out.is_over:
            return
        self._heard_s, self._pinged_s = self._loop.time(), None
        try:
            self._reader.add(data)
        except FrameError as error:
            self._fail(error.code, error.why)
            return
        self._take_turn()

    def eof_received(self) -> bool:
        """The client sends no more, so it reads no more."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self.out.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        for call in [*self.calls.values()]:
            call.drop()
        self.owner.closed(self)

    def pause_writing(self) -> None:
        """The client reads more slowly than the router writes."""
        self.out.is_paused = True

    def resume_writing(self) -> None:
        """The client has read."""
        self.out.is_paused = False
        self.out.wake()

    def _take_turn(self) -> None:
        """Reads some frames, and the rest in later turns of the loop."""
        ends_s = time.perf_counter() + TURN_S  # The loop's own time may stand still in a turn.
        try:
            for _ in range(FRAMES_A_TURN):
                if self.out.is_over or (frame := self._reader.next()) is None:
                    return
                self._read(frame)
                if time.perf_counter() > ends_s:
                    break
            self.outer.want(False)
            self._loop.call_soon(self._take_next_turn)
        except FrameError as error:
            self._fail(error.code, error.why)
        except ProtocolError as error:
            self.out.tell()
            self._fail(None, "headers" if isinstance(error, DenialOfServiceError) else "h2")

    def _take_next_turn(self) -> None:
        if not self.out.is_over:
            self.outer.want(True)
            self._take_turn()

    def _read(self, frame: Frame) -> None:
        if frame.kind == Kind.GOAWAY:  # `h2` would let no call under way go on.
            self._bye()
            return
        if self._is_late(frame) and not self._allowance.spend():
            raise FrameError(ErrorCodes.ENHANCE_YOUR_CALM, "frames")
        for event in self._h2.receive_data(frame.data):
            self._hear(event)
        self.out.tell()

    def _is_late(self, frame: Frame) -> bool:
        """Whether it belongs to a call that is over. `h2` answers each such frame."""
        if frame.kind not in (Kind.DATA, Kind.HEADERS):
            return False
        if frame.stream_id > self._h2.highest_inbound_stream_id:
            return False
        stream = self._h2.streams.get(frame.stream_id)
        return stream is None or stream.closed

    def _hear(self, event: Event) -> None:
        match event:
            case RequestReceived():
                self._begin(event.stream_id or 0, event.headers or ())
            case DataReceived():
                self._h2.acknowledge_received_data(
                    event.flow_controlled_length or 0, event.stream_id or 0
                )
                if (call := self.calls.get(event.stream_id or 0)) is not None:
                    call.came(event.data or b"")
            case StreamEnded():
                if (call := self.calls.get(event.stream_id or 0)) is not None:
                    call.came_all()
            case StreamReset():
                self._reset_by_client(event.stream_id or 0)
            case WindowUpdated() | RemoteSettingsChanged():
                self._greet()
                self.out.wake()

    def _greet(self) -> None:
        """The client has said hello, and may be silent from now on."""
        if not self._is_greeted:
            self._is_greeted = True
            self.outer.settle()

    def _begin(self, stream_id: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self.leaving or len(self.calls) >= MOST_CALLS:
            self._h2.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            if not self.leaving and not self._resets.spend():
                raise FrameError(ErrorCodes.ENHANCE_YOUR_CALM, "calls")
            return
        call = GrpcCall(self, self._h2.streams[stream_id])
        try:
            head = heads.Head.of(headers)
        except heads.NotGrpcError as error:
            self.out.headers(stream_id, heads.not_grpc(error), last=True)
        except heads.HeadError as error:
            call.refuse(error.code, error.message)
        else:
            self.outer.begin_request()
            if not self.calls:
                self._look_in(PING_S)
            self.calls[stream_id] = call
            call.start(head)

    def _reset_by_client(self, stream_id: int) -> None:
        if (call := self.calls.get(stream_id)) is None:
            return
        call.drop()
        if not self._resets.spend():
            raise FrameError(ErrorCodes.ENHANCE_YOUR_CALM, "resets")

    def _bye(self) -> None:
        """The client begins no more calls."""
        self.leaving = True
        self._left_s = self._left_s or self._loop.time()
        self._close_if_done()

    # How it ends.

    def ended(self, call: GrpcCall) -> None:
        """The task of a call has ended."""
        del self.calls[call.stream_id]
        self.outer.end_request()
        self._quiet_s = self._loop.time()
        self._close_if_done()

    def leave(self) -> None:
        """Asks the client for another connection, and closes this one behind its calls."""
        if not self.out.is_over and not self.leaving:
            self.out.send(goaway(self._h2.highest_inbound_stream_id))
            self._bye()

    def abort(self) -> None:
        """Ends the calls and closes the connection, behind what was written."""
        for call in [*self.calls.values()]:
            call.drop()
        self._close()

    def _unread(self) -> None:
        if not self.out.is_over:
            self.out.is_over = True
            self.owner.ended("unread")
            self.outer.abort()

    def _look_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Looks whether the client lives, and whether the connection is to end."""
        if self.out.is_over:
            return
        now_s = self._loop.time()
        if not self.leaving:
            is_idle = not self.calls and now_s - self._quiet_s >= self.owner.idle_s
            if is_idle or now_s >= self._old_s:
                self.owner.ended("idle" if is_idle else "age")
                self.leave()
        elif self._left_s and now_s - self._left_s >= self.owner.grace_s:
            self.owner.ended("grace")
            self.abort()
        if self.calls and now_s - self._heard_s >= PING_S:
            self._ping(now_s)
        if not self.out.is_over:
            rest_s = min(self._quiet_s + self.owner.idle_s, self._old_s) - now_s
            self._look_in(PING_S if self.calls or self.leaving else max(rest_s, PING_S))

    def _ping(self, now_s: float) -> None:
        if self._pinged_s is None:
            self._pinged_s = now_s
            self._h2.ping(_PING)
            self.out.tell()
        elif now_s - self._pinged_s >= PING_TIMEOUT_S:
            self.owner.ended("silent")
            self.outer.abort()

    def _fail(self, code: ErrorCodes | None, why: str) -> None:
        """Ends it for what the client did. `code`: None if `h2` has said it."""
        logger.debug("a connection ends: %s", why)
        self.owner.ended(why)
        if code is not None:
            self.out.send(goaway(self._h2.highest_inbound_stream_id, code))
        self.out.is_over = True
        for call in [*self.calls.values()]:
            call.drop()
        self._close()

    def _close_if_done(self) -> None:
        if self.leaving and not self.calls:
            self._close()

    def _close(self) -> None:
        """Closes it behind what was written."""
        self.out.flush()
        self.out.is_over = True
        if self._transport is not None:
            self._transport.close()


def _settings(most_calls: int) -> Settings:
    values = {
        SettingCodes.MAX_CONCURRENT_STREAMS: most_calls,
        SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        SettingCodes.MAX_HEADER_LIST_SIZE: heads.MOST_METADATA_BYTES,
    }
    return Settings(client=False, initial_values=values)
