"""What the two ends of a channel send each other, over a socket of their own.

The sender announces each push before its pages leave, the receiver reports its end. Notifications
of a transport would carry that, too, but are seen at the next poll, half a millisecond later: as
much as the wire takes for 150 MiB.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import struct
import time
from typing import Final, NamedTuple, Self

import numpy as np

from kv_transfer.types import PageIds

KEY_BYTES: Final = 16
KEY_S: Final = 2.0
"""Who connects has to show the key within this time: the end that knows it may be next in line."""
_PUSH: Final = struct.Struct("<QBII")
"""Handle, group, pages, bytes of the payload."""
_ID: Final = np.dtype("<i4")
_HANDLE: Final = struct.Struct("<Q")


class Push(NamedTuple):
    """What the receiver has to know of a push."""

    handle: int
    """The sender's."""
    target: PageIds
    """Pages of the receiver's pool, in the order in which they come."""
    payload: bytes
    """What to show when all of them are there."""
    group: int = 0
    """Group of the pages."""

    def packed(self) -> bytes:
        """As it is sent."""
        header = _PUSH.pack(self.handle, self.group, len(self.target), len(self.payload))
        return header + self.target.astype(_ID, copy=False).tobytes() + self.payload


class Wire:
    """One end. Methods that wait are for the channel's thread. The last four are for any thread,
    and end its wait."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._socket = connection
        self._landed = b""
        self._heard = b""
        """Read, and not looked at yet."""

    @classmethod
    def accept(cls, server: socket.socket, key: bytes, timeout_s: float) -> Self:
        """Waits for the end that knows the key; others are turned away.

        Raises:
            TimeoutError: it did not come.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            server.settimeout(max(1e-3, until_s - time.monotonic()))
            connection, _ = server.accept()
            connection.settimeout(KEY_S)
            with contextlib.suppress(OSError):
                if hmac.compare_digest(connection.recv(KEY_BYTES, socket.MSG_WAITALL), key):
                    return cls(connection)
            connection.close()

    @classmethod
    def connect(cls, host: str, port: int, key: bytes, timeout_s: float) -> Self:
        """To where the other end accepts. Raises OSError."""
        connection = socket.create_connection((host, port), timeout_s)
        connection.sendall(key)
        return cls(connection)

    def send_push(self, push: Push) -> None:
        """Sender. May wait for the receiver's end to read."""
        self._socket.sendall(push.packed())

    def has_push(self) -> bool:
        """Receiver: `next_push` would not wait; the other end may be closed instead."""
        return bool(self._heard) or self._has(select.POLLIN)

    def next_push(self) -> Push:
        """Receiver: waits for the next push. Raises EOFError: the other end is closed."""
        handle, group, num_pages, payload_bytes = _PUSH.unpack(self._read(_PUSH.size))
        target = np.frombuffer(self._read(_ID.itemsize * num_pages), _ID)
        return Push(handle, target, self._read(payload_bytes), group)

    def send_landed(self, handle: int) -> None:
        """Receiver: a push is where it belongs."""
        self._socket.sendall(_HANDLE.pack(handle))

    def landed(self) -> list[int]:
        """Sender: pushes that the receiver reported since the last call; returns at once.

        Raises:
            EOFError: the other end is closed; nothing that it reported is lost.
        """
        try:
            read = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not read:
            raise EOFError
        self._landed += read
        whole = len(self._landed) // _HANDLE.size * _HANDLE.size
        whole_handles, self._landed = self._landed[:whole], self._landed[whole:]
        return [handle for (handle,) in _HANDLE.iter_unpack(whole_handles)]

    def is_over(self) -> bool:
        """Receiver: the sender announces no further push, whatever is still to be read."""
        return self._has(select.POLLRDHUP)

    def stop_reading(self) -> None:
        """Who waits for a push meets the end; the sender does not yet."""
        self._shut(socket.SHUT_RD)

    def end_sending(self) -> None:
        """The other end meets the end behind all that it was sent."""
        self._shut(socket.SHUT_WR)

    def close(self) -> None:
        """Ends it for both."""
        self._shut(socket.SHUT_RDWR)
        self._socket.close()

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(how)

    def _has(self, what: int) -> bool:
        """Whether `select.poll` would report it now. True of a socket that is closed here."""
        watch = select.poll()
        try:
            watch.register(self._socket, what)
        except (OSError, ValueError):
            return True
        return bool(watch.poll(0))

    def _read(self, count: int) -> bytes:
        """So many bytes, and whatever else is there by then: each look takes its time."""
        try:
            while len(self._heard) < count:
                more = self._socket.recv(1 << 16)
                if not more:
                    raise EOFError
                self._heard += more
        except OSError as error:  # Closed here, or reset there.
            raise EOFError from error
        read, self._heard = self._heard[:count], self._heard[count:]
        return read
