"""Moving pages between the pool and host slots. A page is a row of bytes.

A mover's calls block until the bytes are there. Saves come from one thread and loads from another,
so that the two directions run at the same time.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.pages.runs import merged
from engine.types import PageIds


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
    """Copies by the device's copy engines, on a stream for each direction. `slots` are pinned."""

    def __init__(self, pages: Tensor, slots: Tensor) -> None:
        self._pages = pages
        self._slots = slots[:, : pages.shape[1]]
        self._most = len(slots) if slots.shape[1] == pages.shape[1] else 1
        """Pages in one copy. Only without padding, neighbours are one run of bytes."""
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
        with torch.cuda.stream(stream), torch.no_grad():
            for first, place, count in merged(read, written):
                for at in range(0, count, self._most):
                    size = min(self._most, count - at)
                    here = source[first + at : first + at + size].view(-1)
                    target[place + at : place + at + size].view(-1).copy_(here, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
        done.synchronize()


def mover_for(pages: Tensor, slots: Tensor) -> PageMover:
    """The mover for the pool's device."""
    return CudaMover(pages, slots) if pages.is_cuda else CpuMover(pages, slots)
