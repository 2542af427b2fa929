"""A client of HTTP/2 that a test drives by hand: `h2` as a client, or bare frames."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    Event,
    PingAckReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes

from router.doors.http2.frames import PREFACE, Kind, frame

__all__ = ["PREFACE", "Answer", "Kind", "Raw", "frame", "raw"]

STREAM = "/baton.inference.v1.InferenceService/StreamGenerate"
HEAD = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", STREAM),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
SOON_S = 20.0


def framed(message: bytes) -> bytes:
    """With gRPC's prefix."""
    return b"\0" + struct.pack(">I", len(message)) + message


@dataclass
class Answer:
    """What came on a stream."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    trailers: dict[bytes, bytes] = field(default_factory=dict)
    data: bytes = b""
    frames: int = 0
    ended: bool = False
    reset: int | None = None

    @property
    def messages(self) -> list[bytes]:
        """The whole messages so far; frames of gRPC must be right."""
        found, rest = [], self.data
        while len(rest) >= 5:
            size = int.from_bytes(rest[1:5], "big")
            assert rest[0] == 0
            if len(rest) < 5 + size:
                break
            found.append(rest[5 : 5 + size])
            rest = rest[5 + size :]
        return found

    @property
    def status(self) -> tuple[int, str]:
        """The status of gRPC, from trailers, or from the only headers."""
        found = self.trailers or self.headers
        return int(found[b"grpc-status"]), found.get(b"grpc-message", b"").decode()


class Raw:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self.answers: dict[int, Answer] = {}
        self.goaway: int | None = None
        self.gone = False
        self._unread = b""
        self.pongs = 0
        self.opens_windows = True

    def greet(self, window: int | None = None) -> None:
        """The preface and settings."""
        if window is not None:
            self.h2.local_settings = type(self.h2.local_settings)(
                client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window}
            )
        self.h2.initiate_connection()
        self.flush()

    def ask(
        self,
        message: bytes | None,
        headers: Iterable[tuple[str, str]] = (),
        *,
        end: bool = True,
        **replaced: str,
    ) -> int:
        """Begins a call; returns its stream's number. `message`: None sends headers alone."""
        named = {name.lstrip(":").replace("-", "_"): name for name, _ in HEAD}
        own = {named[key]: value for key, value in replaced.items()}
        head = [(name, own.get(name, value)) for name, value in HEAD]
        stream = self.h2.get_next_available_stream_id()
        self.answers[stream] = Answer()
        self.h2.send_headers(stream, [*head, *headers], end_stream=message is None and end)
        if message is not None:
            self.h2.send_data(stream, framed(message), end_stream=end)
        self.flush()
        return stream

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def write(self, data: bytes) -> None:
        """Bytes that `h2` does not know of."""
        self.writer.write(data)

    async def turn(self, most: int = 1 << 16) -> bool:
        """Reads once; False if the connection has ended."""
        try:
            data = await self.reader.read(most)
        except ConnectionResetError:
            data = b""
        if not data:
            self.gone = True
            return False
        self._unread += data
        while len(self._unread) >= 9:
            whole = 9 + int.from_bytes(self._unread[:3], "big")
            if len(self._unread) < whole:
                break
            one, self._unread = self._unread[:whole], self._unread[whole:]
            if one[3] == Kind.GOAWAY:  # `h2` would take no more data behind it.
                self.goaway = int.from_bytes(one[13:17], "big")
                continue
            for event in self.h2.receive_data(one):
                self._take(event)
        self.flush()
        return True

    async def until_ended(self, *streams: int) -> None:
        """Reads until these streams have ended, or the connection."""
        async with asyncio.timeout(SOON_S):
            while not all(self.answers[one].ended for one in streams) and await self.turn():
                pass

    async def until_gone(self) -> None:
        """Reads until the connection has ended."""
        async with asyncio.timeout(SOON_S):
            while await self.turn():
                pass

    def _take(self, event: Event) -> None:
        answer = self.answers.get(getattr(event, "stream_id", None) or 0, Answer())
        match event:
            case ResponseReceived():
                answer.headers = dict(event.headers)
            case TrailersReceived():
                answer.trailers = dict(event.headers)
            case DataReceived():
                answer.data += event.data
                answer.frames += 1
                if self.opens_windows and event.flow_controlled_length:
                    self.h2.increment_flow_control_window(event.flow_controlled_length)
                    if event.stream_ended is None:
                        self.h2.increment_flow_control_window(
                            event.flow_controlled_length, event.stream_id
                        )
            case StreamEnded():
                answer.ended = True
            case StreamReset():
                answer.ended, answer.reset = True, event.error_code
            case PingAckReceived():
                self.pongs += 1


@asynccontextmanager
async def raw(address: str, buffer: int = 0) -> AsyncIterator[Raw]:
    """A connection to an address. `buffer`: bytes that the client's system takes unread."""
    host, _, port = address.rpartition(":")
    client = socket.socket()
    if buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.connect((host, int(port)))
    reader, writer = await asyncio.open_connection(sock=client, limit=buffer or 1 << 16)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()
