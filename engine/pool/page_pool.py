"""Pages of one size in a run of bytes, whatever is in them."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor


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

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copies whole pages, all layers: `target[i]` becomes `source[i]`. Both are [N] int64. No
        page may be both a source and a target."""
        self.data[target] = self.data[source]
