"""One direction between two processes over a collective library: pages gathered, sent, scattered.

A lane is a communicator of two ranks, the sender rank 0, a socket (`kv_transfer.lane_wire`) and a
thread at either end. Both sides of a pair have a lane of their own towards the other: on a shared
one, two sends that meet would each wait for the other's end.

Life of a lane: FORMING until both ends have found each other -> OPEN: pushes go through in the
order given, cut into pieces, `slots` staging buffers deep -> FAILED, by `close` or by trouble; what
was in progress then has no known end -> at the sender OVER, once the receiver's end is closed,
which it is when it writes no page any more.

Invariants: both ends cut a push alike; a staging buffer is used again only when the device is done
with what it held.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from kv_transfer.lane_wire import KEY_BYTES, LaneWire, Push
from kv_transfer.pool import PoolMemory
from kv_transfer.types import PageIds

logger = logging.getLogger(__name__)

FORM_S: Final = timedelta(seconds=20)
"""Within this time both ends must have found each other."""
SENDER, RECEIVER = 0, 1

_WIRE: Final = "wire"
"""Under this key of the rendezvous: where the sender accepts, and the key to show there."""


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """How a lane moves pages. The same at both ends."""

    piece_bytes: int = 128 << 20
    """Of a staging buffer."""
    end_bytes: int = 64 << 20
    """Of the first and the last piece of a push: the wire waits while the one is gathered, and
    whoever waits for the push while the other is scattered."""
    slots: int = 3
    """Staging buffers of a lane: one is gathered into, one sent from, one still to be let go."""


USUAL: Final = LaneOptions()


def cut(num_pages: int, most: int, ends: int) -> Iterator[slice]:
    """The pieces of a push: `most` pages each, the first and the last `ends` at most."""
    start = 0
    while start < num_pages:
        size = ends if start == 0 else min(most, num_pages - start - ends)
        stop = min(num_pages, start + max(size, ends))
        yield slice(start, stop)
        start = stop


class _Queue:
    """Work on a device in the order given. On a CPU it is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self) -> AbstractContextManager[object]:
        """What is done inside is queued here."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def uses(self, tensor: Tensor) -> None:
        """What is queued so far reads memory of another queue: it must not be used again before."""
        if self.stream is not None:
            tensor.record_stream(self.stream)

    def end(self) -> torch.cuda.Event | None:
        """Of what is queued so far; None: it is over."""
        if self.stream is None:
            return None
        done = torch.cuda.Event(blocking=True)  # Who waits for a frozen peer does not spin.
        done.record(self.stream)
        return done


class _Slot(NamedTuple):
    """A staging buffer and the queue of all its work, where a new use waits for the one before."""

    buffer: Tensor
    """[bytes] uint8"""
    queue: _Queue

    @classmethod
    def of(cls, num_bytes: int, device: torch.device) -> _Slot:
        """A new one."""
        return cls(torch.empty(num_bytes, dtype=torch.uint8, device=device), _Queue(device))

    def pages(self, count: int, page_bytes: int) -> Tensor:
        """[count, page_bytes] as `_words`."""
        return _words(self.buffer[: count * page_bytes].view(count, page_bytes))


class _Piece(NamedTuple):
    """Some pages of a push on their way through a slot."""

    ids: Tensor
    """[n] int64, pages of the pool."""
    staged: Tensor
    """[n, page_bytes] as `_words`."""
    queue: _Queue
    """The slot's."""
    ends: Push | None
    """The push, if it ends with this piece."""


class Lane(ABC):
    """One end. Every method may be called from any thread and returns at once."""

    def __init__(self, name: str, pool: PoolMemory, options: LaneOptions) -> None:
        self.failed = False
        """Set before the communicator is torn down: what ends then has not arrived."""
        self._pool = pool
        self._options = options
        self._group: Any = None
        self._wire: LaneWire | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-{name}", daemon=True)
        self._thread.start()

    @abstractmethod
    def close(self) -> None:
        """Ends the lane; a device that waits for the other end is let go."""

    def _run(self) -> None:
        try:
            self._wire, self._group = self._form()
            if not self.failed:
                self._serve(self._wire)
        except Exception as error:
            if not self.failed:
                logger.warning("a lane failed: %s", type(error).__name__)
        self._tear_down()
        if self._wire is not None:
            self._leave(self._wire)

    def _serve(self, wire: LaneWire) -> None:
        """Moves pushes until the lane is closed."""
        device, page_bytes = self._pool.pages.device, self._pool.page_bytes
        most = max(1, self._options.piece_bytes // page_bytes)
        ends = max(1, min(self._options.end_bytes // page_bytes, most))
        slots = [_Slot.of(most * page_bytes, device) for _ in range(self._options.slots)]
        turns, uploads = cycle(slots), _Queue(device)
        while (wanted := self._next(wire)) is not None:
            pages, push = wanted
            with uploads():
                ids = torch.from_numpy(pages).long().to(device)
            for part in cut(len(pages), most, ends):
                slot = next(turns)
                staged = slot.pages(part.stop - part.start, page_bytes)
                is_last = part.stop == len(pages)
                self._move(_Piece(ids[part], staged, slot.queue, push if is_last else None))
                slot.queue.uses(ids)
            self._moved()

    def _tear_down(self) -> None:
        self.failed = True
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(Exception):
                group.abort()

    @abstractmethod
    def _form(self) -> tuple[LaneWire, Any]:
        """Meets the other end: the wire, and the communicator of the two."""

    @abstractmethod
    def _next(self, wire: LaneWire) -> tuple[PageIds, Push] | None:
        """Waits for the next push, and its pages at this end; None: the lane is closed."""

    @abstractmethod
    def _move(self, piece: _Piece) -> None:
        """Queues, or does, what a piece takes."""

    @abstractmethod
    def _moved(self) -> None:
        """That was a push's last piece."""

    @abstractmethod
    def _leave(self, wire: LaneWire) -> None:
        """The lane is closed at this end: lets the other know."""


class SendLane(Lane):
    """The end that pages leave from."""

    def __init__(self, name: str, pool: PoolMemory, options: LaneOptions) -> None:
        host = _own_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=FORM_S)
        self._server = socket.create_server((host, 0))
        self._pushes: queue.SimpleQueue[tuple[PageIds, Push] | None] = queue.SimpleQueue()
        self._left = False
        self.address = f"{host}:{self._store.port}"
        """Where the other end finds this one."""
        super().__init__(name, pool, options)

    @property
    def is_over(self) -> bool:
        """It failed, and the other end will write no page any more."""
        never_met = self._wire is None and not self._thread.is_alive()
        return self.failed and (self._left or never_met)

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
        """See `Lane`."""
        self._tear_down()
        self._pushes.put(None)
        self._server.close()
        if self._wire is not None:
            self._wire.close()

    def _form(self) -> tuple[LaneWire, Any]:
        key = secrets.token_bytes(KEY_BYTES)
        self._store.set(_WIRE, f"{self._server.getsockname()[1]}:{key.hex()}")
        with self._server:
            wire = LaneWire.accept(self._server, key, FORM_S.total_seconds())
        return wire, form_group(self._store, SENDER, self._pool.pages.device)

    def _next(self, wire: LaneWire) -> tuple[PageIds, Push] | None:
        wanted = self._pushes.get()
        if wanted is not None:
            wire.tell_push(wanted[1])
        return wanted

    def _move(self, piece: _Piece) -> None:
        with piece.queue():
            torch.index_select(_words(self._pool.pages), 0, piece.ids, out=piece.staged)
            self._group.send([piece.staged.view(-1)], RECEIVER, 0).wait()

    def _moved(self) -> None:
        """That it has landed is for the other end to say."""

    def _leave(self, wire: LaneWire) -> None:
        wire.stop_telling()


class ReceiveLane(Lane):
    """The end that pages arrive at. A piece is scattered once it is seen to be there, not behind
    its receive on the device, where one that is torn down ends, too."""

    def __init__(self, name: str, pool: PoolMemory, address: str, options: LaneOptions) -> None:
        self._address = address
        self._due: deque[tuple[_Piece, torch.cuda.Event | None]] = deque()
        """Pieces to be scattered, and when they are here."""
        self._landing: deque[tuple[Push | None, torch.cuda.Event | None]] = deque()
        """Pieces that are scattered: the push that ends with it, and when it is in the pool."""
        super().__init__(name, pool, options)

    def landed(self) -> list[bytes]:
        """Payloads of pushes whose last byte is in the pool, since the last call. The sender is
        told."""
        ended = []
        while self._landing and _is_done(self._landing[0][1]):
            push, _ = self._landing.popleft()
            if push is not None and self._wire is not None:
                ended.append(push.payload)
                with contextlib.suppress(OSError):  # The sender is gone; so is who would listen.
                    self._wire.tell_landed(push.handle)
        if self._due and self._wire is not None and self._wire.is_over():
            self._tear_down()  # Nobody sends what is due: its thread would wait for ever.
        return ended

    def close(self) -> None:
        """See `Lane`."""
        self._tear_down()
        if self._wire is not None:
            self._wire.stop_reading()

    def _form(self) -> tuple[LaneWire, Any]:
        host, _, port = self._address.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=FORM_S)
        wire_port, _, key = store.get(_WIRE).decode().partition(":")
        form_s = FORM_S.total_seconds()
        wire = LaneWire.connect(host, int(wire_port), bytes.fromhex(key), form_s)
        return wire, form_group(store, RECEIVER, self._pool.pages.device)

    def _next(self, wire: LaneWire) -> tuple[PageIds, Push] | None:
        try:
            push = wire.next_push()
        except EOFError:
            return None
        return push.target, push

    def _move(self, piece: _Piece) -> None:
        if len(self._due) == self._options.slots:
            self._scatter()
        with piece.queue():
            self._group.recv([piece.staged.view(-1)], SENDER, 0).wait()
        self._due.append((piece, piece.queue.end()))

    def _moved(self) -> None:
        while self._due:
            self._scatter()

    def _scatter(self) -> None:
        piece, received = self._due[0]
        if received is not None:
            received.synchronize()
        if self.failed:
            raise EOFError("torn down")
        with piece.queue():
            _words(self._pool.pages).index_copy_(0, piece.ids, piece.staged)
        self._landing.append((piece.ends, piece.queue.end()))
        self._due.popleft()

    def _leave(self, wire: LaneWire) -> None:
        for _, done in list(self._landing):
            if done is not None:
                done.synchronize()
        wire.close()


def _words(pages: Tensor) -> Tensor:
    """Bytes as the longest words that divide a page: gathering works word by word."""
    fits = next(t for t in (torch.int64, torch.int32, torch.uint8) if not _splits(pages, t))
    return pages.view(fits)


def _splits(pages: Tensor, word: torch.dtype) -> bool:
    return pages.shape[-1] % word.itemsize != 0 or pages.data_ptr() % word.itemsize != 0


def _is_done(event: torch.cuda.Event | None) -> bool:
    return event is None or event.query()


def form_group(store: Store, rank: int, device: torch.device) -> Any:
    """A communicator of two: NCCL between GPUs, Gloo between hosts' memories."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = distributed.ProcessGroupNCCL.Options()
        # Gathering and scattering fill a GPU: the wire's few blocks go first.
        options.is_high_priority_stream = True
        options._timeout = timedelta(days=365)  # a lane waits for work, not for a deadline
        return distributed.ProcessGroupNCCL(store, rank, 2, options)
    return distributed.ProcessGroupGloo(store, rank, 2, timedelta(days=365))


def _own_address() -> str:
    """Where the peer finds this host: its name's address, which is its own on a single host."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
