"""A drafter that says what it is told, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.speculation.drafter import Drafts
from engine.speculation.tables import SlotTables

Script = Callable[[list[int]], Sequence[int]]
"""Drafts for a sequence, from its tokens so far."""


class ScriptedDrafter:
    """Drafts whatever a script says."""

    name = "scripted"

    def __init__(self, most: int, script: Script) -> None:
        self.most = most
        self._script = script

    def draft(self, tables: SlotTables, slots: Tensor) -> Drafts:
        """See `Drafter`."""
        ids = torch.zeros((len(slots), self.most), dtype=torch.int64)
        ready = torch.zeros(len(slots), dtype=torch.int64)
        lengths = tables.length[slots].tolist()
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
            said = list(self._script(tables.history[slot, : length + 1].tolist()))[: self.most]
            ids[row, : len(said)] = torch.tensor(said, dtype=torch.int64)
            ready[row] = len(said)
        return Drafts(ids.to(tables.device), ready.to(tables.device))
