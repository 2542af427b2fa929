"""Frames of HTTP/2 as bytes: what comes is checked here before `h2` reads it.

`h2` takes some thirty microseconds for a frame, and a client pays nine bytes for it. So frames are
counted by their heads, and those that a client has no need of come out of an `Allowance`. What
would fill memory in `h2` is left out of the frames that it gets (`known_settings`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Final, NamedTuple

from h2.errors import ErrorCodes

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of every client."""
HEAD_BYTES: Final = 9
"""Head of a frame, by the protocol."""
MOST_FRAME_BYTES: Final = 1 << 14
"""Most bytes of a frame's payload: the protocol's own default."""
MOST_BLOCK_BYTES: Final = 1 << 16
"""Most bytes of a call's headers as they are sent. More end the connection, and all its calls, so
this is above what refuses a call alone (`heads.MOST_METADATA_BYTES`)."""
PREFIX_BYTES: Final = 5
"""Before each message of gRPC: whether it is compressed, and its length."""
SMALL_BYTES: Final = 256
"""A frame of data below this is one that a client has no need of, unless it is the last. A prompt
of 8 MiB in frames of this size takes a second of the loop, and any smaller ones the allowance."""
ALLOWED_FRAMES: Final = 1000
"""Frames that a client may send at once without a need: the ends of three times all its calls."""
ALLOWED_A_SECOND: Final = 200
"""Such frames a second, in the long run: 6 ms of the loop."""
ALLOWED_A_FRAME: Final = 2
"""Such frames for each frame that it got for a call. Clients open windows, one for each call at
least, and measure with pings. Small parts of a message earn nothing: a client that opens its window
by some bytes a time makes them itself."""
_HEAD: Final = struct.Struct(">BHBBI")
_MESSAGE_HEAD: Final = struct.Struct(">BHBBIBI")
"""Head of a frame of data, and the prefix of a message that is not compressed."""
_SETTING: Final = struct.Struct(">HI")
_HEADER_TABLE_SIZE: Final = 1  # SETTINGS_HEADER_TABLE_SIZE
_KNOWN_SETTINGS: Final = range(1, 7)
"""Identifiers of the settings that the protocol has."""
_TABLE_BYTES: Final = 4096
"""Most memory of a table of headers that we send: the protocol's default. A client may offer more,
and would then fill ours."""
_ID_MASK: Final = 0x7FFF_FFFF
"""A bit of a stream's number is reserved."""


class Kind(IntEnum):
    """Types of frames."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


END_STREAM: Final = 1  # flag of the protocol
END_HEADERS: Final = 4  # flag of the protocol
ACK: Final = 1  # flag of the protocol


class FrameError(Exception):
    """A client's frames end its connection."""

    def __init__(self, code: ErrorCodes, why: str) -> None:
        super().__init__(why)
        self.code = code
        self.why = why
        """A short stable word."""


class Frame(NamedTuple):
    """A whole frame."""

    kind: int
    data: bytes
    """With its head."""

    @property
    def stream_id(self) -> int:
        """Number of its stream."""
        return int.from_bytes(self.data[5:9], "big") & _ID_MASK


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A frame."""
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def message_frame(stream_id: int, message: bytes) -> bytes:
    """A frame of data that holds one message of gRPC. It must fit into a frame."""
    size = len(message)
    whole = size + PREFIX_BYTES
    return (
        _MESSAGE_HEAD.pack(whole >> 16, whole & 0xFFFF, Kind.DATA, 0, stream_id, 0, size) + message
    )


def goaway(last_stream_id: int, code: int = 0) -> bytes:
    """A frame that asks the client to take another connection for calls behind this one."""
    return frame(Kind.GOAWAY, 0, 0, struct.pack(">II", last_stream_id, code))


class Allowance:
    """Counts what a client may do, in the long run and at once.

    Args:
        at_once: most that it has saved.
        a_second: what it gets each second.
        clock: seconds.
    """

    def __init__(self, at_once: float, a_second: float, clock: Callable[[], float]) -> None:
        self._at_once = self._left = at_once
        self._a_second = a_second
        self._clock = clock
        self._counted_s = clock()

    def earn(self, count: float) -> None:
        """Gets more, for what it received."""
        self._left = min(self._at_once, self._left + count)

    def spend(self) -> bool:
        """Takes one; False if nothing is left."""
        if self._left < 1:
            now_s = self._clock()
            self.earn((now_s - self._counted_s) * self._a_second)
            self._counted_s = now_s
        self._left -= 1
        return self._left >= 0


class FrameReader:
    """Whole frames out of bytes, each checked by its head.

    Args:
        allowance: for frames that a client has no need of.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._bytes = bytearray()
        self._greeted = 0
        """Bytes of the preface that came."""
        self._block_bytes = 0
        """Bytes of headers whose end did not come."""

    def add(self, data: bytes) -> None:
        """Bytes came. The caller takes the whole frames before it adds more, so little waits here.

        Raises:
            FrameError: they are not HTTP/2.
        """
        if (missing := len(PREFACE) - self._greeted) > 0:
            first, data = data[:missing], data[missing:]
            if not PREFACE.startswith(first, self._greeted):
                raise FrameError(ErrorCodes.PROTOCOL_ERROR, "preface")
            self._greeted += len(first)
        self._bytes += data

    def next(self) -> Frame | None:
        """The next whole frame, None if it has not come.

        Raises:
            FrameError: it is too large, or one too many.
        """
        if len(self._bytes) < HEAD_BYTES:
            return None
        size = int.from_bytes(self._bytes[:3], "big")
        if size > MOST_FRAME_BYTES:
            raise FrameError(ErrorCodes.FRAME_SIZE_ERROR, "frame_size")
        if len(self._bytes) < HEAD_BYTES + size:
            return None
        kind, flags = self._bytes[3], self._bytes[4]
        data = bytes(self._bytes[: HEAD_BYTES + size])
        del self._bytes[: HEAD_BYTES + size]
        self._check(kind, flags, size)
        if kind == Kind.SETTINGS and not flags & ACK:
            data = known_settings(data)
        return Frame(kind, data)

    def _check(self, kind: int, flags: int, size: int) -> None:
        if kind in (Kind.HEADERS, Kind.CONTINUATION):
            self._block_bytes += size
            if self._block_bytes > MOST_BLOCK_BYTES:
                raise FrameError(ErrorCodes.ENHANCE_YOUR_CALM, "headers")
            if flags & END_HEADERS:
                self._block_bytes = 0
        is_needed = kind == Kind.HEADERS or (
            kind == Kind.DATA and (size >= SMALL_BYTES or bool(flags & END_STREAM))
        )
        if not is_needed and not self._allowance.spend():
            raise FrameError(ErrorCodes.ENHANCE_YOUR_CALM, "frames")


def known_settings(data: bytes) -> bytes:
    """A frame of settings without those that nobody knows: `h2` would keep each of them."""
    payload = data[HEAD_BYTES:]
    if len(payload) % _SETTING.size:
        return data  # An error, which `h2` finds.
    kept = b"".join(
        _SETTING.pack(key, min(value, _TABLE_BYTES) if key == _HEADER_TABLE_SIZE else value)
        for key, value in _SETTING.iter_unpack(payload)
        if key in _KNOWN_SETTINGS
    )
    return frame(Kind.SETTINGS, 0, int.from_bytes(data[5:9], "big") & _ID_MASK, kept)
