"""Where pages wait on their way through a lane: the pieces of a push, and staging buffers.

A piece is gathered from the pool into a slot's buffer and sent, or received there and scattered.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from kv_transfer.lane_wire import Push
from kv_transfer.types import PageIds


def cut(num_pages: int, most: int, ends: int) -> Iterator[slice]:
    """The pieces of a push: `most` pages each, the first and the last `ends` at most."""
    start = 0
    while start < num_pages:
        size = ends if start == 0 else min(most, num_pages - start - ends)
        stop = min(num_pages, start + max(size, ends))
        yield slice(start, stop)
        start = stop


class Queue:
    """Work on a device in the order given. On a CPU it is done at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self) -> AbstractContextManager[object]:
        """What is done inside is queued here."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def end(self, *, blocking: bool = False) -> torch.cuda.Event | None:
        """Of what is queued so far; None: it is over. Who waits for it spins, some 50 us the
        sooner, or else blocks."""
        if self.stream is None:
            return None
        done = torch.cuda.Event(blocking=blocking)
        done.record(self.stream)
        return done


class Slot:
    """A staging buffer and the queue of all its work, where a new use waits for the one before."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device) -> None:
        self.pages = words(torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device))
        """[pages, page_bytes] as `words`."""
        self.ids = torch.empty(num_pages, dtype=torch.int64, device=device)
        """[pages], where in the pool they belong."""
        self.queue = Queue(device)
        is_gpu = device.type == "cuda"
        self._host_ids = torch.empty(num_pages, dtype=torch.int64, pin_memory=is_gpu)
        self._copied: torch.cuda.Event | None = None
        """When the device has read those."""

    def name(self, pages: PageIds) -> None:
        """Queues the copy of `ids`."""
        if self._copied is not None:
            self._copied.synchronize()
        count = len(pages)
        self._host_ids.numpy()[:count] = pages
        self.ids[:count].copy_(self._host_ids[:count], non_blocking=True)
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

    @property
    def staged(self) -> Tensor:
        """[n, page_bytes] as `words`, the slot's."""
        return self.slot.pages[: len(self.pages)]

    @property
    def ids(self) -> Tensor:
        """[n] int64, the slot's."""
        return self.slot.ids[: len(self.pages)]


def words(pages: Tensor) -> Tensor:
    """Bytes as the longest words that divide a page: gathering works word by word."""
    fits = next(t for t in (torch.int64, torch.int32, torch.uint8) if not _splits(pages, t))
    return pages.view(fits)


def _splits(pages: Tensor, word: torch.dtype) -> bool:
    return pages.shape[-1] % word.itemsize != 0 or pages.data_ptr() % word.itemsize != 0
