"""Host memory for pages: one memory file of slots, which other processes can map, too."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Final

import torch

from engine.tiers.touching import touched_file

SLOT_ALIGNMENT: Final = 4096
"""Slots begin and end at multiples of this many bytes, as direct reads of disks want it."""


def slot_bytes(page_bytes: int) -> int:
    """Bytes of a slot: those of a page, padded."""
    return -(-page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def divided(host_bytes: int, pools: Sequence[tuple[int, int]]) -> list[int]:
    """The host memory of each group: they divide it so that each has slots for an equal share of
    its pages. `pools`: pages of each, and bytes of a page."""
    sizes = [count * slot_bytes(page_bytes) for count, page_bytes in pools]
    return [host_bytes * size // sum(sizes) for size in sizes]


class HostArena:
    """Slots of host memory, all touched. For a GPU they are pinned.

    Args:
        size: bytes of all slots together; rounded down to whole slots.
        page_bytes: bytes of a page.
        device: the device of the pool.

    Raises:
        HostMemoryError: less can be touched.
        ValueError: not even two slots fit.
    """

    def __init__(self, size: int, page_bytes: int, device: torch.device) -> None:
        self.slot_bytes = slot_bytes(page_bytes)
        self.num_slots = size // self.slot_bytes
        if self.num_slots < 2:
            raise ValueError(
                f"{size} bytes of host memory hold {self.num_slots} pages of {self.slot_bytes}"
                " bytes: at least 2 are needed"
            )
        size = self.num_slots * self.slot_bytes
        self.fd = touched_file(size)
        self.memory = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
        self.slots = torch.frombuffer(self.memory, dtype=torch.uint8).view(self.num_slots, -1)
        """[num_slots, slot_bytes] uint8. Slot 0 is never used: a block manager's scratch page."""
        self._pinned = device.type == "cuda"
        if self._pinned:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cudart.cudaHostRegister(self.slots.data_ptr(), size, 0))

    def close(self) -> None:
        """Gives the memory back once nobody maps it any more. No copy may be under way."""
        if self._pinned:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self.slots.data_ptr())
        os.close(self.fd)
