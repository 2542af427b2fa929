"""Room for lines of batches: what interactive requests leave, and some more.

A priority orders what waits, but what runs is not sent away. So a line is sent only where an
interactive request that comes next would find a slot, and hardly a prompt before its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from router.workers.load_estimate import Capacity

RESERVED: Final = 0.5
"""Part of the slots that a line leaves free. With a quarter, first tokens come 36 % later at 0.3 of
the capacity, with half 4 % (bench/README.md)."""
AHEAD_S: Final = 0.02
"""Time of prompts that may wait at a prefill worker before a line's own; not tuned."""
LOOK_S: Final = 0.02
"""Time between two looks, while there is no room."""
APART_S: Final = 0.005
"""Time between two lines, in which the first one reaches the workers' estimates."""


class Worker(Protocol):
    """The part of `WorkerLink` that is read here."""

    prefills: bool
    decodes: bool

    def capacity(self) -> Capacity:
        """Its capacity, by the router's estimate."""
        ...


class Room:
    """Lets one line after the other in, on one event loop.

    Args:
        workers: attached now.
        queued: requests that wait in the router.
    """

    def __init__(self, workers: Callable[[], Iterable[Worker]], queued: Callable[[], int]) -> None:
        self._workers = workers
        self._queued = queued
        self._turn = asyncio.Lock()

    async def enter(self) -> None:
        """Returns when there is room."""
        async with self._turn:
            while not self._is_free():
                await asyncio.sleep(LOOK_S)
            await asyncio.sleep(APART_S)

    def _is_free(self) -> bool:
        if self._queued():
            return False
        slots, ahead = [], []
        for worker in self._workers():
            capacity = worker.capacity()
            if worker.decodes:
                slots.append(capacity.free_sequences > RESERVED * capacity.max_sequences)
            if worker.prefills:
                most = capacity.prefill_tokens_per_s * AHEAD_S
                ahead.append(capacity.queued_prefill_tokens <= most)
        # Where there is no worker, a line learns that from its answer, and is sent again.
        return (any(slots) or not slots) and (any(ahead) or not ahead)
