"""Staging buffers of a channel, through which the pages of a push go in segments.

A segment is gathered from the pool into a slot's buffer and sent, or received there and scattered.
Slots are taken in turn. While one is on the wire, the next is gathered or the one before scattered.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from kv_transfer.nccl.wire import Push
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import PageIds


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """How a channel cuts pushes. Both ends must have the same."""

    segment_bytes: int = 64 << 20
    """Size of a staging buffer, and the most that a segment has."""
    slots: int = 3
    """Number of staging buffers: one on the wire, one that is gathered into or scattered from, and
    one that is queued."""


class Queue:
    """Work on a device in the order given. On a CPU it is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._inside: AbstractContextManager[object] = contextlib.nullcontext()
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._inside = torch.cuda.stream(self._stream)

    def __call__(self) -> AbstractContextManager[object]:
        """Work inside of this context is queued here. For one thread at a time."""
        return self._inside

    def end(self, *, blocking: bool = False) -> torch.cuda.Event | None:
        """The end of the work queued so far; None: it is over. A `blocking` event lets the thread
        that waits for it sleep; for another one it spins, and goes on some 50 us sooner."""
        if self._stream is None:
            return None
        done = torch.cuda.Event(blocking=blocking)
        done.record(self._stream)
        return done


class Slot:
    """A staging buffer and the queue of all its work, where a new use waits for the one before."""

    def __init__(self, size: int, num_pages: int, device: torch.device) -> None:
        """Makes a slot of `size` bytes, for at most `num_pages` pages."""
        self.queue = Queue(device)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self._ids = torch.empty(num_pages, dtype=torch.int64, device=device)
        is_gpu = device.type == "cuda"
        self._host_ids = torch.empty(num_pages, dtype=torch.int64, pin_memory=is_gpu)
        self._copied: torch.cuda.Event | None = None
        """When the device has read those."""

    def staged(self, segment: Segment) -> Tensor:
        """[n, page_bytes] as words of the pool: where the segment's pages are staged."""
        pool, count = segment.pool, len(segment.pages)
        size = count * pool.shape[1] * pool.itemsize
        return self._buffer[:size].view(count, -1).view(pool.dtype)

    def ids(self, segment: Segment) -> Tensor:
        """[n] int64: the segment's pages in the pool, queued to be copied to the device."""
        count = len(segment.pages)
        if self._copied is not None:
            self._copied.synchronize()
        self._host_ids[:count].numpy()[:] = segment.pages
        self._ids[:count].copy_(self._host_ids[:count], non_blocking=True)
        self._copied = self.queue.end(blocking=True)
        return self._ids[:count]


class Segment(NamedTuple):
    """Some pages of a push on their way through a slot."""

    pages: PageIds
    """[n], of the group's pool."""
    pool: Tensor
    """[num_pages, page_bytes] as `words`: all pages of the group."""
    slot: Slot
    ends: Push | None
    """The push, if it ends with this segment."""


class Staging:
    """The slots of a channel, taken in turn. For one thread at a time."""

    def __init__(self, pool: PoolMemory, options: ChannelOptions) -> None:
        self._pools = [words(pool.pages(group)) for group in range(len(pool.groups))]
        self._most = [max(1, options.segment_bytes // group.page_bytes) for group in pool.groups]
        sizes = [
            most * group.page_bytes for most, group in zip(self._most, pool.groups, strict=True)
        ]
        device = pool.data.device
        slots = [Slot(max(sizes), max(self._most), device) for _ in range(options.slots)]
        self._turns = cycle(slots)

    def segments(self, pages: PageIds, push: Push) -> Iterator[Segment]:
        """The segments of a push with these `pages` at this end. Each takes its slot when it is
        asked for."""
        most, pool = self._most[push.group], self._pools[push.group]
        for start in range(0, len(pages), most):
            part = pages[start : start + most]
            ends = push if start + most >= len(pages) else None
            yield Segment(part, pool, next(self._turns), ends)


def words(pages: Tensor) -> Tensor:
    """Bytes as the longest words that divide a page: gathering works word by word."""
    fits = next(t for t in (torch.int64, torch.int32, torch.uint8) if not _splits(pages, t))
    return pages.view(fits)


def _splits(pages: Tensor, word: torch.dtype) -> bool:
    return pages.shape[-1] % word.itemsize != 0 or pages.data_ptr() % word.itemsize != 0
