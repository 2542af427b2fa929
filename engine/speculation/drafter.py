"""What guesses tokens."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from engine.speculation.tables import SlotTables


class Drafts(NamedTuple):
    """Guesses for R rows."""

    ids: Tensor
    """[R, K] int64. An id that is no token ends its row's drafts."""
    ready: Tensor
    """[R] int64: how many of them are there, 0 to K."""


class Drafter(Protocol):
    """Guesses the next tokens of sequences. It belongs to the device's thread."""

    name: str
    most: int
    """K: the most drafts of a row."""

    def draft(self, tables: SlotTables, slots: Tensor) -> Drafts:
        """Guesses what follows the newest tokens of the sequences in these slots, [R] int64."""
        ...
