"""Pages of states: a page has the state of one sequence, of all layers of its group.

The order is `(num_pages, units, num_layers, numbers of a unit)`. So a rank's share of a page is one
run, as it is of a page of tokens. Each layer and unit has a stamp beside its numbers: how many
tokens are folded in. Who reads a state compares it with the number that it expects, because no page
table can show that a state is too old, or came in part.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from engine.pool.page_pool import PagePool

STAMP_NUMBERS: Final = 32
"""Numbers that a stamp takes, of which it uses one: 128 bytes, as much as a GPU's memory hands out
at once, so that matrices behind it are aligned."""
SPOILT: Final = -1
"""Stamp of a state that must not be used: it equals no number of tokens."""


class StatePool(PagePool):
    """States in float32, whatever the model's dtype is."""

    layout = "state-unit-outer-2"
    precision = "float32"

    def __init__(
        self,
        *,
        num_pages: int,
        num_layers: int,
        units: int,
        numbers: int,
        device: torch.device,
        data: Tensor | None = None,
    ) -> None:
        """`numbers`: of the state of a unit in a layer, without the stamp. `data` is as in
        `PagePool`."""
        self.units = units
        self.numbers = numbers
        unit_bytes = unit_bytes_of(num_layers, numbers)
        super().__init__(
            num_pages=num_pages,
            num_layers=num_layers,
            page_bytes=units * unit_bytes,
            device=device,
            data=data,
        )
        shape = num_pages, units, num_layers, STAMP_NUMBERS + numbers
        self.elements = self.data.view(torch.float32).view(shape)
        """All numbers, with the stamps before those of each layer."""
        self.integers = self.data.view(torch.int32).view(shape)
        """All memory as integers, for the stamps."""

    def layer(self, layer: int) -> Tensor:
        """States of a layer, [num_pages, units, numbers] float32, a strided view."""
        return self.elements[:, :, layer, STAMP_NUMBERS:]

    def stamps(self, layer: int) -> Tensor:
        """Tokens folded into each, [num_pages, units] int32, a strided view."""
        return self.integers[:, :, layer, 0]


def unit_bytes_of(num_layers: int, numbers: int) -> int:
    """Bytes of a unit in a page."""
    return num_layers * (STAMP_NUMBERS + numbers) * torch.float32.itemsize
