"""One packed copy to the device per step.

A step's integers are put one after the other into pinned memory and copied at once:

1. `begin` changes to the next of the pinned buffers, because copies of the last steps may still
   run. It waits for the copy that was made of it before, which is usually long done;
2. `add` appends a section and returns its future place on the device; `room` leaves the writing to
   the caller;
3. `upload` queues the copy on the current stream.

Sections of equal sizes in equal order have equal addresses, so a graph may read them.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int32s = NDArray[np.int32]

ALIGNMENT = 32
"""Alignment of sections, in integers. They begin at multiples of 128 bytes."""
_MOST_PLACES = 4096
"""Places that are kept, a few hundred bytes each. Steps without a graph have others each time."""


class StagingError(Exception):
    """A step needs more room than the buffers have."""


class StepStaging:
    """Pinned buffers on the host, one on the device."""

    def __init__(self, capacity: int, device: torch.device, buffers: int = 2) -> None:
        """`capacity` is in integers, with the gaps between sections. `buffers`: copies that may not
        have been made yet, and the one being prepared."""
        pinned = device.type == "cuda"
        self._device = torch.zeros(capacity, dtype=torch.int32, device=device)
        turns = range(buffers)
        self._host = [torch.zeros(capacity, dtype=torch.int32, pin_memory=pinned) for _ in turns]
        self._arrays: list[Int32s] = [host.numpy() for host in self._host]
        self._copied = [torch.cuda.Event() if pinned else None for _ in turns]
        self._turn = 0
        self._used = 0
        self._places: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def begin(self) -> None:
        """Starts a step."""
        self._turn = (self._turn + 1) % len(self._host)
        self._used = 0
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()

    def add(self, values: Int32s) -> Tensor:
        """Appends a section; returns its place on the device."""
        room, place = self.room(values.shape)
        room[...] = values
        return place

    def room(self, shape: tuple[int, ...]) -> tuple[Int32s, Tensor]:
        """Appends a section that the caller writes before `upload`; returns it, with what an older
        step has left there, and its place on the device."""
        start, end = self._used, self._used + math.prod(shape)
        if end > len(self._device):
            raise StagingError(f"a step of {end} integers does not fit {len(self._device)}")
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return self._arrays[self._turn][start:end].reshape(shape), self._place(start, shape)

    def _place(self, start: int, shape: tuple[int, ...]) -> Tensor:
        """A section's place. Steps of a shape have the same ones, and PyTorch takes microseconds to
        make one."""
        if (place := self._places.get((start, shape))) is None:
            if len(self._places) >= _MOST_PLACES:
                self._places.clear()
            place = self._device[start : start + math.prod(shape)].view(shape)
            self._places[start, shape] = place
        return place

    def upload(self) -> None:
        """Queues the copy of the added sections."""
        used = min(self._used, len(self._device))
        self._device[:used].copy_(self._host[self._turn][:used], non_blocking=True)
        copied = self._copied[self._turn]
        if copied is not None:
            copied.record()
