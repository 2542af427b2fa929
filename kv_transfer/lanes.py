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
from itertools import cycle
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import Store

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
    """Of a staging buffer."""
    end_bytes: int = 32 << 20
    """Of the first and the last piece of a push: the wire waits while the one is gathered, and
    whoever waits for the push while the other is scattered."""
    slots: int = 3
    """Staging buffers of a lane: one is gathered into, one sent from, one still to be let go."""


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
        done = torch.cuda.Event()
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
            self._serve()
        except Exception as error:
            if not self.failed:
                logger.warning("a lane failed: %s", type(error).__name__)
            self.failed = True

    def _serve(self) -> None:
        """Moves batches until the lane is closed."""
        device, page_bytes = self._pool.pages.device, self._pool.page_bytes
        most = max(1, self._options.piece_bytes // page_bytes)
        ends = max(1, min(self._options.end_bytes // page_bytes, most))
        slots = [_Slot.of(most * page_bytes, device) for _ in range(self._options.slots)]
        turns, uploads = cycle(slots), _Queue(device)
        for batch in iter(lambda: self._batches.get(), None):
            # Nothing here waits for what is queued, so the wire never waits for this thread.
            with uploads():
                ids = torch.from_numpy(batch.pages).long().to(device)
            for part in cut(len(batch.pages), most, ends):
                slot = next(turns)
                with slot.queue():
                    self._move(ids[part], slot.pages(part.stop - part.start, page_bytes))
                slot.queue.uses(ids)
                is_last = batch.is_last and part.stop == len(batch.pages)
                self._queued(batch.push, is_last, slot.queue)

    @abstractmethod
    def _move(self, ids: Tensor, staged: Tensor) -> None:
        """Queues, or does, what a piece takes.

        Args:
            ids: [n] int64, pages of the pool.
            staged: [n, page_bytes] as `_words`.
        """

    @abstractmethod
    def _queued(self, push: int, is_last: bool, behind: _Queue) -> None:
        """What a piece of a push takes is queued."""


class SendLane(Lane):
    """The end that pages leave from. That they have is for the other end to say."""

    def _queued(self, push: int, is_last: bool, behind: _Queue) -> None:
        pass

    def _move(self, ids: Tensor, staged: Tensor) -> None:
        torch.index_select(_words(self._pool.pages), 0, ids, out=staged)
        self._group.send([staged.view(-1)], RECEIVER, 0).wait()


class ReceiveLane(Lane):
    """The end that pages arrive at."""

    def __init__(self, name: str, pool: PoolMemory, form: FormGroup, options: LaneOptions) -> None:
        self._arriving: deque[tuple[torch.cuda.Event | None, int, bool]] = deque()
        """Pieces: when they are in the pool, their push, and whether they are its last."""
        super().__init__(name, pool, form, options)

    def landed(self) -> list[int]:
        """Pushes whose last byte is in the pool, since the last call."""
        ended = []
        while self._arriving and _is_done(self._arriving[0][0]):
            _, push, is_last = self._arriving.popleft()
            if is_last:
                ended.append(push)
        return ended

    def _move(self, ids: Tensor, staged: Tensor) -> None:
        self._group.recv([staged.view(-1)], SENDER, 0).wait()
        _words(self._pool.pages).index_copy_(0, ids, staged)

    def _queued(self, push: int, is_last: bool, behind: _Queue) -> None:
        self._arriving.append((behind.end(), push, is_last))


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
