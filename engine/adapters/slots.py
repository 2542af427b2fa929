"""Which adapters the device has. It belongs to the step loop's thread.

The device has room for a few. An adapter stays in its slot as long as a sequence uses it, and then
until another one needs the slot: the one that was used longest ago goes first.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.adapters.types import Adapter
from engine.adapters.waits import SlotWaits
from engine.loads import AdapterLoad

NO_SLOT: Final = -1
"""A row without an adapter."""
Wanted = tuple[tuple[int, Adapter], ...]
"""Slots with what a step wants to be there."""


class AdapterSlots:
    """See the module."""

    def __init__(self, count: int) -> None:
        self.loads = 0
        """How often a slot got another adapter."""
        self.evictions = 0
        """How often one had to leave its slot for that."""
        self.waits = SlotWaits()
        self._count = count
        self._told: tuple[tuple[bytes, ...], int] | None = None
        """Residents and idle slots, until either changes."""
        self._free = list(range(count - 1, -1, -1))
        self._slot_of: dict[bytes, int] = {}
        """By digest, those that were used longest ago first."""
        self._contents: dict[int, Adapter] = {}
        """Contents of the slots in use. What nobody uses need not be in host memory, too."""
        self._users: Counter[bytes] = Counter()

    def has_room(self, adapter: Adapter | None) -> bool:
        """Whether sequences with this adapter may begin now."""
        if adapter is None or adapter.digest in self._slot_of or self._free:
            return True
        return any(not self._users[digest] for digest in self._slot_of)

    def take(self, adapter: Adapter) -> int:
        """The slot of an adapter, for one request. Steps say what they want in their slots, so the
        device fills it before the first of them."""
        digest = adapter.digest
        if digest not in self._slot_of:
            self._slot_of[digest] = self._free.pop() if self._free else self._idle()
            self.loads += 1
        slot = self._slot_of[digest]
        self._contents[slot] = adapter
        self._users[digest] += 1
        self._told = None
        return slot

    def give_back(self, adapter: Adapter) -> None:
        """A request uses its adapter no more."""
        digest = adapter.digest
        self._users[digest] -= 1
        self._told = None
        assert self._users[digest] >= 0, "an adapter is given back once"
        self._slot_of[digest] = slot = self._slot_of.pop(digest)
        if not self._users[digest]:
            del self._contents[slot]

    def wanted(self, slots: NDArray[np.int32]) -> Wanted:
        """What a step of rows with these slots wants to be there."""
        found = np.unique(slots[slots != NO_SLOT])
        return tuple((slot, self._contents[slot]) for slot in found.tolist())

    @property
    def resident(self) -> frozenset[bytes]:
        """Digests of the adapters in slots."""
        return frozenset(self._slot_of)

    @property
    def used(self) -> int:
        """Slots whose adapter is in use."""
        return sum(self._users[digest] > 0 for digest in self._slot_of)

    def load(self) -> AdapterLoad:
        """What is reported of them, every turn of the step loop."""
        if self._told is None:
            newest = reversed(self._slot_of)
            order = sorted(newest, key=lambda digest: not self._users[digest])
            self._told = tuple(order), self._count - self.used
        resident, idle = self._told
        return AdapterLoad(
            resident=resident,
            slots=self._count,
            idle_slots=idle,
            loads=self.loads,
            evictions=self.evictions,
            waits=self.waits.count,
            waited_s=self.waits.seconds,
            recent_wait_s=self.waits.recent_s(),
        )

    def _idle(self) -> int:
        digest = next(each for each in self._slot_of if not self._users[each])
        del self._users[digest]
        self.evictions += 1
        return self._slot_of.pop(digest)
