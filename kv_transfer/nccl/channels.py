"""One direction between two processes over a collective library: pages gathered, sent, scattered.

A channel is a communicator of two ranks, of which the sender is rank 0, a socket
(`kv_transfer.nccl.wire`) and a thread at either end. Each process of a pair has a channel of its
own towards the other. On a shared one, two sends that meet would each wait for the other's end.

Life of a channel: FORMING until both ends have found each other and are connected, for bounded time
-> OPEN: pushes go through in the order given, cut into segments, `slots` staging buffers deep ->
FAILED, by `close` or by an error. Nobody knows how pushes in progress ended -> OVER at the sender,
once the receiver's end is closed. The receiver closes it when it writes no page any more.

Invariants: both ends cut a push alike. A staging buffer is used again only when the device is done
with its pages.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from datetime import timedelta
from typing import Any, Final

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from kv_transfer.nccl.groups import RECEIVER, SENDER, abort_group, form_group, receive, send
from kv_transfer.nccl.staging import ChannelOptions, Segment, Staging
from kv_transfer.nccl.wire import KEY_BYTES, Push, Wire
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import PageIds

logger = logging.getLogger(__name__)

FORM_S: Final = timedelta(seconds=20)
"""Within this time both ends must have found each other."""
CONNECT_S: Final = timedelta(seconds=60)
"""Time in which a channel must be connected, which takes NCCL seconds where its code is not loaded
yet."""

_WIRE: Final = "wire"
"""Under this key of the rendezvous: where the sender accepts, and the key to show there."""


class Channel(ABC):
    """One end. Every method may be called from any thread and returns at once."""

    rank: int

    def __init__(self, name: str, pool: PoolMemory, options: ChannelOptions) -> None:
        self.failed = False
        """Set before the communicator is torn down: what ends then has not arrived."""
        self._pool = pool
        self._options = options
        self._group: Any | None = None
        """Held here alone: Gloo closes its connections when the last reference goes."""
        self._wire: Wire | None = None
        """From the time when both ends have found each other."""
        self._is_open = False
        """Set when pushes go through."""
        self._thread = threading.Thread(target=self._run, name=f"kv-{name}", daemon=True)
        self._thread.start()

    @abstractmethod
    def close(self) -> None:
        """Ends the channel; a device that waits for the other end is let go."""

    def _run(self) -> None:
        try:
            self._form()
            if not self.failed and self._wire is not None:
                staging = Staging(self._pool, self._options)
                self._is_open = True
                self._serve(self._wire, staging)
        except Exception as error:
            self._fail(error)
        self._tear_down()
        if self._wire is not None:
            self._leave(self._wire)

    def _form(self) -> None:
        device = self._pool.data.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._wire, store = self._meet()
        if not self.failed:
            self._group = form_group(store, self.rank, device, CONNECT_S)

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            logger.warning("a channel failed: %s", type(error).__name__)
        self._tear_down()

    def _tear_down(self) -> None:
        self.failed = True
        group, self._group = self._group, None
        abort_group(group)

    @abstractmethod
    def _meet(self) -> tuple[Wire, Store]:
        """Finds the other end: the wire to it, and where the two rendezvous."""

    @abstractmethod
    def _serve(self, wire: Wire, staging: Staging) -> None:
        """Moves pushes until the channel is closed."""

    @abstractmethod
    def _move(self, segment: Segment) -> None:
        """Queues, or does, what a segment takes."""

    @abstractmethod
    def _leave(self, wire: Wire) -> None:
        """The channel is closed at this end: lets the other know."""


class SendChannel(Channel):
    """The end that pages leave from."""

    rank = SENDER

    def __init__(self, name: str, pool: PoolMemory, options: ChannelOptions) -> None:
        host = _own_address()
        self._store = _open_store(host)
        self._server = socket.create_server((host, 0))
        self._pushes: queue.SimpleQueue[tuple[PageIds, Push] | None] = queue.SimpleQueue()
        self._left = False
        self.address = f"{host}:{self._store.port}"
        """Where the other end finds this one."""
        super().__init__(name, pool, options)

    @property
    def is_over(self) -> bool:
        """It failed, and the other end will write no page any more."""
        never_formed = not self._is_open and not self._thread.is_alive()
        return self.failed and (self._left or never_formed)

    def put(self, source: PageIds, push: Push) -> None:
        """The next push; its pages `source` go to its `target`."""
        self._pushes.put((source, push))

    def landed(self) -> list[int]:
        """Handles of pushes that are where they belong, since the last call."""
        if self._wire is None or self._left:
            return []
        try:
            return self._wire.landed()
        except (EOFError, OSError):
            self._left = self.failed = True
            return []

    def close(self) -> None:
        """See `Channel`."""
        self._tear_down()
        self._pushes.put(None)
        self._server.close()
        if self._wire is not None:
            self._wire.close()

    def _meet(self) -> tuple[Wire, Store]:
        key = secrets.token_bytes(KEY_BYTES)
        self._store.set(_WIRE, f"{self._server.getsockname()[1]}:{key.hex()}")
        with self._server:
            return Wire.accept(self._server, key, FORM_S.total_seconds()), self._store

    def _serve(self, wire: Wire, staging: Staging) -> None:
        while (put := self._pushes.get()) is not None:
            source, push = put
            wire.send_push(push)
            for segment in staging.segments(source, push):
                if self.failed:
                    return
                self._move(segment)

    def _move(self, segment: Segment) -> None:
        slot = segment.slot
        with slot.queue():
            staged = slot.staged(segment)
            torch.index_select(segment.pool, 0, slot.ids(segment), out=staged)
            send(self._group, staged.view(-1))

    def _leave(self, wire: Wire) -> None:
        wire.end_sending()


class ReceiveChannel(Channel):
    """The end that pages arrive at.

    A segment is scattered when the host has seen it arrive. It is not queued behind its receive,
    since a receive that is torn down ends, too.
    """

    rank = RECEIVER

    def __init__(self, name: str, pool: PoolMemory, address: str, options: ChannelOptions) -> None:
        self._address = address
        self._due: deque[tuple[Segment, torch.cuda.Event | None]] = deque()
        """Segments to be scattered, and when they are here."""
        self._landing: deque[tuple[Push | None, torch.cuda.Event | None]] = deque()
        """Segments that are scattered: the push that ends with it, and when it is in the pool."""
        self._landed: deque[bytes] = deque()
        """Payloads of pushes that are there, not reported to the process yet."""
        super().__init__(name, pool, options)

    def landed(self) -> list[bytes]:
        """Payloads of pushes whose last byte is in the pool, since the last call."""
        if self._due and self._wire is not None and self._wire.is_over():
            self._tear_down()  # Nobody sends what is due: its thread would wait for ever.
        return [self._landed.popleft() for _ in range(len(self._landed))]

    def close(self) -> None:
        """See `Channel`."""
        self._tear_down()
        if self._wire is not None:
            self._wire.stop_reading()

    def _meet(self) -> tuple[Wire, Store]:
        host, _, port = self._address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=FORM_S)
        wire_port, _, key = store.get(_WIRE).decode().partition(":")
        form_s = FORM_S.total_seconds()
        return Wire.connect(host, int(wire_port), bytes.fromhex(key), form_s), store

    def _serve(self, wire: Wire, staging: Staging) -> None:
        while (push := self._next(wire)) is not None:
            for segment in staging.segments(push.target, push):
                self._move(segment)
            while self._due:
                self._scatter()

    def _next(self, wire: Wire) -> Push | None:
        """Waits for the next push; None: the channel is closed."""
        try:
            if not wire.has_push():
                self._send_landed(waits=True)
            return wire.next_push()
        except EOFError:
            return None

    def _move(self, segment: Segment) -> None:
        if len(self._due) == self._options.slots:
            self._scatter()
        slot = segment.slot
        with slot.queue():
            receive(self._group, slot.staged(segment).view(-1))
            # A thread that waits for a frozen peer sleeps.
            received = slot.queue.end(blocking=True)
        self._due.append((segment, received))

    def _scatter(self) -> None:
        segment, received = self._due[0]
        if received is not None:
            received.synchronize()
        if self.failed:
            raise EOFError("torn down")
        slot = segment.slot
        with slot.queue():
            segment.pool.index_copy_(0, slot.ids(segment), slot.staged(segment))
        self._landing.append((segment.ends, slot.queue.end()))
        self._due.popleft()
        self._send_landed(waits=False)

    def _send_landed(self, waits: bool) -> None:
        """Reports pushes that are in the pool; all that are scattered, if it waits for them.
        This process hears of it before the sender does, which lets go of the pages."""
        while self._landing and (waits or _is_done(self._landing[0][1])):
            push, done = self._landing.popleft()
            if done is not None:
                done.synchronize()
            if push is not None and self._wire is not None:
                self._landed.append(push.payload)
                with contextlib.suppress(OSError):  # The sender is gone; so is who would listen.
                    self._wire.send_landed(push.handle)

    def _leave(self, wire: Wire) -> None:
        for _, done in self._landing:
            if done is not None:
                done.synchronize()
        wire.close()


def _is_done(event: torch.cuda.Event | None) -> bool:
    return event is None or event.query()


def _open_store(host: str) -> TCPStore:
    """Where the ends meet. By itself a store listens on every interface."""
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=FORM_S,
        master_listen_fd=listening.detach(),
    )


def _own_address() -> str:
    """Where the peer finds this host: its name's address, which is its own on a single host."""
    if os.environ.get("NCCL_SOCKET_IFNAME") == "lo":
        return "127.0.0.1"
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
