"""One direction between two processes over a collective library: pages gathered, sent, scattered.

A lane is a communicator of two ranks, the sender rank 0, and a thread at either end. Both sides of
a pair have a lane of their own towards the other: on a shared one, two sends that meet would each
wait for the other's end.

Life of a lane: FORMING until both ends have found each other -> OPEN: batches of pages go through
in the order given, cut into pieces, `slots` staging buffers deep -> CLOSED, by `close` or by
trouble; what was in progress then has no known end.

Invariants: both ends cut a batch alike; a staging buffer is used again only when the device is done
with what it held.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Store

from kv_transfer.packing import gather, scatter
from kv_transfer.pool import PoolMemory
from kv_transfer.types import PageIds

logger = logging.getLogger(__name__)

FORM_S: Final = timedelta(seconds=20)
"""Within this time both ends must have found each other."""
SENDER, RECEIVER = 0, 1

FormGroup = Callable[[], Any]
"""Makes the process group; blocks until the other end does the same."""


@dataclass(frozen=True, slots=True)
class LaneOptions:
    """How a lane moves pages. The same at both ends."""

    piece_bytes: int = 128 << 20
    """Of a staging buffer. Between two H200: 64 MiB give 146-197 GB/s, 128 MiB 225, 256 MiB 231."""
    end_bytes: int = 128 << 20
    """Of the first and the last piece at most: the wire waits for the one, and then for nothing
    but the other's way into the pool."""
    slots: int = 3
    """Staging buffers of a lane: one is gathered into, one sent from, one still to be let go."""
    blocks: int = 64
    """Of the kernels that gather and scatter on a GPU: 877 GB/s on an H200, 579 with 32."""


USUAL: Final = LaneOptions()


class Batch(NamedTuple):
    """Pages of one push, in the order in which they go."""

    push: int
    """The sender's handle of the push that they belong to."""
    pages: PageIds
    is_last: bool


def cut(num_pages: int, most: int, ends: int) -> Iterator[slice]:
    """The pieces of a batch: `most` pages each, the first and the last `ends` at most."""
    start = 0
    while start < num_pages:
        size = ends if start == 0 else min(most, num_pages - start - ends)
        stop = min(num_pages, start + max(size, ends))
        yield slice(start, stop)
        start = stop


class _Slot:
    """A staging buffer and, on a GPU, the stream that all its work is queued on."""

    def __init__(self, pool: PoolMemory, num_pages: int) -> None:
        device = pool.pages.device
        self._buffer = torch.empty(num_pages * pool.page_bytes, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: torch.cuda.Event | None = None

    def pages(self, count: int, page_bytes: int) -> Tensor:
        """[count, page_bytes] as `_words`, once the last use is over."""
        if self._done is not None:
            self._done.synchronize()
        return _words(self._buffer[: count * page_bytes].view(count, page_bytes))

    def in_order(self) -> AbstractContextManager[object]:
        """What is queued inside runs behind what was queued before on this slot."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def used(self) -> torch.cuda.Event | None:
        """Marks the end of a use; None where it is over already."""
        if self._stream is not None:
            self._done = torch.cuda.Event()
            self._done.record(self._stream)
        return self._done


class Lane(ABC):
    """One end. Every method may be called from any thread and returns at once."""

    def __init__(self, name: str, pool: PoolMemory, form: FormGroup, options: LaneOptions) -> None:
        self.failed = False
        self._pool = pool
        self._options = options
        self._form = form
        self._group: Any = None
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-{name}", daemon=True)
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """The next pages."""
        self._batches.put(batch)

    def close(self) -> None:
        """Ends the lane; a device that waits for the other end is let go."""
        self._batches.put(None)
        self.failed = True
        if self._group is not None and self._thread.is_alive():
            with contextlib.suppress(Exception):
                self._group.abort()

    def _run(self) -> None:
        try:
            self._group = self._form()
            most = max(1, self._options.piece_bytes // self._pool.page_bytes)
            ends = max(1, min(self._options.end_bytes // self._pool.page_bytes, most))
            slots = deque(_Slot(self._pool, most) for _ in range(self._options.slots))
            for batch in iter(lambda: self._batches.get(), None):
                for part in cut(len(batch.pages), most, ends):
                    is_last = batch.is_last and part.stop == len(batch.pages)
                    self._move(Batch(batch.push, batch.pages[part], is_last), slots[0])
                    slots.rotate(-1)
        except Exception as error:
            if not self.failed:
                logger.warning("a lane failed: %s", type(error).__name__)
            self.failed = True

    @abstractmethod
    def _move(self, piece: Batch, slot: _Slot) -> None:
        """Queues, or does, what a piece takes."""

    def _ids(self, piece: Batch) -> Tensor:
        return torch.from_numpy(piece.pages).long().to(self._pool.pages.device)


class SendLane(Lane):
    """The end that pages leave from."""

    def _move(self, piece: Batch, slot: _Slot) -> None:
        staged = slot.pages(len(piece.pages), self._pool.page_bytes)
        with slot.in_order():
            ids = self._ids(piece)
            gather(_words(self._pool.pages), ids, staged, self._options.blocks)
            self._group.send([staged.view(-1)], RECEIVER, 0).wait()
            slot.used()


class ReceiveLane(Lane):
    """The end that pages arrive at."""

    def __init__(self, name: str, pool: PoolMemory, form: FormGroup, options: LaneOptions) -> None:
        self._arriving: deque[tuple[torch.cuda.Event | None, Batch]] = deque()
        super().__init__(name, pool, form, options)

    def landed(self) -> list[int]:
        """Pushes whose last byte is in the pool, since the last call."""
        ended = []
        while self._arriving and _is_done(self._arriving[0][0]):
            _, piece = self._arriving.popleft()
            if piece.is_last:
                ended.append(piece.push)
        return ended

    def _move(self, piece: Batch, slot: _Slot) -> None:
        staged = slot.pages(len(piece.pages), self._pool.page_bytes)
        with slot.in_order():
            ids = self._ids(piece)  # ahead of the receive: this copy waits for what is queued
            self._group.recv([staged.view(-1)], SENDER, 0).wait()
            scatter(_words(self._pool.pages), ids, staged, self._options.blocks)
            self._arriving.append((slot.used(), piece))


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
