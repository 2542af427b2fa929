"""Where pages wait on their way through a lane: the pieces of a push, and staging buffers.

A piece is gathered from the pool into a slot's buffer and sent, or received there and scattered.
Slots and communicators are taken in turn.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kv_transfer.nccl.wire import Push
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import PageIds

ROOMS: Final = 32
"""Sizes of pieces that a slot remembers."""


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """How a lane moves pages. The same at both ends, but for `at_once`."""

    piece_bytes: int = 128 << 20
    """Of a staging buffer: half of that is sent sooner than a thread queues the next."""
    first_bytes: int = 64 << 20
    """Of a push's first piece: the wire waits while it is gathered. No piece is more than twice as
    long as the one before."""
    last_bytes: int = 32 << 20
    """Pieces shrink down to this towards a push's end: whoever waits for the push waits while the
    last one is scattered."""
    slots: int = 3
    """Staging buffers of a lane: two on the wire, one gathered into or scattered from."""
    groups: int = 2
    """Communicators."""
    at_once: int = 2
    """Pieces queued by who puts a push, while the sender's thread wakes up; at most `slots`."""

    @classmethod
    def usual(cls, pool: PoolMemory) -> LaneOptions:
        """For pages of this kind of memory: Gloo's sends wait for the other end, and so are the
        thread's alone."""
        return cls() if pool.memory == "VRAM" else cls(at_once=0)


def cut(num_pages: int, most: int, first: int, last: int) -> Iterator[slice]:
    """The pieces of a push: `first` pages, then twice as many each time up to `most`, then two
    thirds of what is left, but `last` if that is fewer."""
    start, size = 0, first
    while start < num_pages:
        left = num_pages - start
        if start:
            size = min(2 * size, most, max(last, left * 2 // 3))
        yield slice(start, start + min(size, left))
        start += size


class Queue:
    """Work on a device in the order given. On a CPU it is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream | None = None
        self._inside: AbstractContextManager[object] = contextlib.nullcontext()
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self._inside = torch.cuda.stream(self.stream)

    def __call__(self) -> AbstractContextManager[object]:
        """What is done inside is queued here. For one thread at a time."""
        return self._inside

    def end(self, *, blocking: bool = False) -> torch.cuda.Event | None:
        """Of what is queued so far; None: it is over. Who waits for it spins, some 50 us the
        sooner, or else blocks."""
        if self.stream is None:
            return None
        done = torch.cuda.Event(blocking=blocking)
        done.record(self.stream)
        return done


class Room(NamedTuple):
    """The beginning of a slot."""

    staged: Tensor
    """[n, page_bytes] as `words`: a piece's pages."""
    flat: Tensor
    """The same in one dimension."""
    ids: Tensor
    """[n] int64, where in the pool they belong."""
    host_ids: Tensor
    """[n] int64, what is copied there."""


class Slot:
    """A staging buffer and the queue of all its work, where a new use waits for the one before."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        self.queue = Queue(device)
        self._pages = words(torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device))
        self._ids = torch.empty(num_pages, dtype=torch.int64, device=device)
        is_gpu = device.type == "cuda"
        self._host_ids = torch.empty(num_pages, dtype=torch.int64, pin_memory=is_gpu)
        self._copied: torch.cuda.Event | None = None
        """When the device has read those."""
        self._rooms: dict[int, Room] = {}
        """By pages. Views take microseconds each, and pushes repeat the sizes of their pieces."""

    def room(self, count: int) -> Room:
        """For so many pages."""
        if (room := self._rooms.get(count)) is None:
            if len(self._rooms) == ROOMS:
                self._rooms.clear()
            staged = self._pages[:count]
            room = Room(staged, staged.view(-1), self._ids[:count], self._host_ids[:count])
            self._rooms[count] = room
        return room

    def name(self, piece: Piece) -> None:
        """Queues the copy of the piece's `ids`."""
        if self._copied is not None:
            self._copied.synchronize()
        piece.room.host_ids.numpy()[:] = piece.pages
        piece.room.ids.copy_(piece.room.host_ids, non_blocking=True)
        self._copied = self.queue.end(blocking=True)


class Piece(NamedTuple):
    """Some pages of a push on their way through a slot."""

    pages: PageIds
    """[n], of the pool."""
    slot: Slot
    group: int
    """Which of the lane's communicators it goes through."""
    is_first: bool
    """Of its push."""
    ends: Push | None
    """The push, if it ends with this piece."""
    room: Room
    """For n pages, the slot's."""


class Staging:
    """The slots of a lane, and whose turn it is. For one thread at a time."""

    def __init__(self, pool: PoolMemory, options: LaneOptions) -> None:
        self._most, self._first, self._last = (
            max(1, min(size, options.piece_bytes) // pool.page_bytes)
            for size in (options.piece_bytes, options.first_bytes, options.last_bytes)
        )
        device = pool.pages.device
        self._slots = [Slot(self._most, pool.page_bytes, device) for _ in range(options.slots)]
        self._turns = cycle(self._slots)
        self._groups = cycle(range(options.groups))
        self._unused = max(options.slots, options.groups)

    def pieces(self, pages: PageIds, push: Push) -> Iterator[Piece]:
        """Of a push, `pages` at this end; each takes its turn when it is asked for."""
        for part in cut(len(pages), self._most, self._first, self._last):
            self._unused = max(0, self._unused - 1)
            slot, group = next(self._turns), next(self._groups)
            is_first, ends = part.start == 0, push if part.stop == len(pages) else None
            yield Piece(pages[part], slot, group, is_first, ends, slot.room(part.stop - part.start))

    @property
    def is_used(self) -> bool:
        """Every slot and communicator was: what a first use makes the device load is there."""
        return not self._unused


def words(pages: Tensor) -> Tensor:
    """Bytes as the longest words that divide a page: gathering works word by word."""
    fits = next(t for t in (torch.int64, torch.int32, torch.uint8) if not _splits(pages, t))
    return pages.view(fits)


def _splits(pages: Tensor, word: torch.dtype) -> bool:
    return pages.shape[-1] % word.itemsize != 0 or pages.data_ptr() % word.itemsize != 0
