"""Counts what a rank computes for tokens, where ranks or workers hold some experts whole: one whose
experts are chosen more often has more to do, and the others wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

_EVERY: Final = 64
"""Steps between two looks at a device's count. Each is a copy of eight bytes, which nobody waits
for. Not tuned."""


class PairCount:
    """Pairs of a token and an expert that a rank has computed, in all layers and steps."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros(1, dtype=torch.int64, device=device)
        """[1]. Kernels add to it."""
        self.tell: Callable[[int], None] = _unheard
        """Hears the count now and then."""
        self._steps = 0
        self._copied: Tensor | None = None

    def add(self, pairs: int) -> None:
        """So many more, on the host."""
        self.total += pairs
        self.tell(int(self.total))

    def note(self) -> None:
        """A step of kernels is queued. Nothing waits for the device: what is told is what was there
        some steps ago."""
        self._steps += 1
        if self._steps % _EVERY:
            return
        if self._copied is None:
            self._copied = torch.zeros(1, dtype=torch.int64, pin_memory=self.total.is_cuda)
        self.tell(int(self._copied))
        self._copied.copy_(self.total, non_blocking=True)


def _unheard(_pairs: int) -> None:
    """Default for `tell`."""
