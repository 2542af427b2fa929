"""Pages of one size in a run of bytes, whatever is in them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

COPIED_BYTES = 1 << 25
"""Most bytes that are copied at once, since they lie in memory of their own in between."""


class PagePool:
    """The pages. They are zeroed at the start: that touches them, and leaves no NaN in unused
    tails."""

    layout: ClassVar[str]
    """Name and version of the order of a page's bytes."""

    def __init__(
        self,
        *,
        num_pages: int,
        num_layers: int,
        page_bytes: int,
        device: torch.device,
        data: Tensor | None,
    ) -> None:
        """`data`: [bytes] uint8, zeroed memory for the pages; None: the pool allocates its own."""
        self.num_pages = num_pages
        self.num_layers = num_layers
        self.device = device
        self.page_bytes = page_bytes
        """Bytes of a page, and the distance from one page to the next."""
        if data is None:
            size = num_pages * page_bytes
            data = torch.empty(size, dtype=torch.uint8, device=device).zero_()
        self.data = data.view(num_pages, page_bytes)
        """[num_pages, page_bytes] uint8."""

    @property
    def planes(self) -> tuple[int, ...]:
        """Bytes of a layer in each plane of a unit: a unit has the first plane of all layers, then
        the next one. Empty: ranks do not divide layers."""
        return ()

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copies whole pages, all layers: `target[i]` becomes what `source[i]` was. Both are [N]
        int64. A page may be both a source and a target."""
        words = self.data.view(torch.int64) if self.page_bytes % 8 == 0 else self.data
        most = max(1, COPIED_BYTES // (words.itemsize * max(1, len(source))))
        for start in range(0, words.shape[1], most):
            part = words[:, start : start + most]
            part[target] = part[source]
