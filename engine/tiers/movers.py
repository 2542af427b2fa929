"""Moving pages between the pool and host slots. A page is a row of bytes.

A mover's calls block until the bytes are there. Saves come from one thread and loads from another,
so that the two directions run at the same time.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

import torch
from torch import Tensor

from engine.pages.runs import merged
from engine.types import PageIds

BATCH_BYTES: Final = 16 << 20
"""Most bytes of a batch of a copy. It is that of a save of eight pages of 2 MiB, beside which steps
are 0.09 ms longer (`bench/README.md`)."""
BATCHES_AHEAD: Final = 2
"""Batches that a device has at a time: it copies one while the next is there."""
Run = tuple[int, int, int]
"""First page read, first place written, number of pages."""


class PageMover(Protocol):
    """Copies pages in both directions."""

    def save(self, pages: PageIds, slots: PageIds) -> None:
        """Copies `pages[i]` into `slots[i]`. Returns when that is done."""
        ...

    def load(self, slots: PageIds, pages: PageIds) -> None:
        """Copies `slots[i]` into `pages[i]`. Returns when that is done."""
        ...


class CpuMover:
    """Copies on the caller's thread, without the interpreter's lock.

    Args:
        pages: [num_pages, page_bytes] uint8, the pool.
        slots: [num_slots, slot_bytes] uint8.
    """

    def __init__(self, pages: Tensor, slots: Tensor) -> None:
        self._pages = pages.numpy()
        self._slots = slots[:, : pages.shape[1]].numpy()

    def save(self, pages: PageIds, slots: PageIds) -> None:
        """See `PageMover`."""
        for page, slot, count in merged(pages, slots):
            self._slots[slot : slot + count] = self._pages[page : page + count]

    def load(self, slots: PageIds, pages: PageIds) -> None:
        """See `PageMover`."""
        for slot, page, count in merged(slots, pages):
            self._pages[page : page + count] = self._slots[slot : slot + count]


class CudaMover:
    """Copies by the device's copy engines, on a stream for each direction. `slots` are pinned.

    A copy engine takes copies of one direction one after the other, whatever their streams. So the
    input of a step could wait there for all that is queued before it: 20 ms for a load of 8,000
    tokens. Therefore the engine gets a copy in small batches, and only few ahead.
    """

    def __init__(self, pages: Tensor, slots: Tensor) -> None:
        self._pages = pages
        self._slots = slots[:, : pages.shape[1]]
        self._most = max(1, BATCH_BYTES // pages.shape[1])
        """Pages in a batch."""
        self._most_in_run = self._most if slots.shape[1] == pages.shape[1] else 1
        """Only without padding, neighbours are one run of bytes."""
        self._saves = torch.cuda.Stream(pages.device)
        self._loads = torch.cuda.Stream(pages.device)

    def save(self, pages: PageIds, slots: PageIds) -> None:
        """See `PageMover`."""
        self._copy(self._saves, self._pages, self._slots, pages, slots)

    def load(self, slots: PageIds, pages: PageIds) -> None:
        """See `PageMover`."""
        self._copy(self._loads, self._slots, self._pages, slots, pages)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        source: Tensor,
        target: Tensor,
        read: PageIds,
        written: PageIds,
    ) -> None:
        posted: deque[torch.cuda.Event] = deque()
        for batch in batches(read, written, self._most, self._most_in_run):
            if len(posted) == BATCHES_AHEAD:
                posted.popleft().synchronize()
            posted.append(self._post(stream, source, target, batch))
        for done in posted:
            done.synchronize()

    @staticmethod
    def _post(
        stream: torch.cuda.Stream, source: Tensor, target: Tensor, batch: list[Run]
    ) -> torch.cuda.Event:
        with torch.cuda.stream(stream), torch.no_grad():
            for first, place, size in batch:
                here = source[first : first + size].view(-1)
                target[place : place + size].view(-1).copy_(here, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
        return done


def batches(read: PageIds, written: PageIds, most: int, most_in_run: int) -> Iterator[list[Run]]:
    """A copy in batches of at most `most` pages, each of runs of at most `most_in_run`."""
    batch: list[Run] = []
    room = most
    for first, place, count in merged(read, written):
        at = 0
        while at < count:
            size = min(count - at, most_in_run, room)
            batch.append((first + at, place + at, size))
            at, room = at + size, room - size
            if not room:
                yield batch
                batch, room = [], most
    if batch:
        yield batch


def mover_for(pages: Tensor, slots: Tensor) -> PageMover:
    """The mover for the pool's device."""
    return CudaMover(pages, slots) if pages.is_cuda else CpuMover(pages, slots)
