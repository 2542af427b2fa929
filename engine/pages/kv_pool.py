"""The KV pool: one plain allocation that holds every page of every layer.

The order is `(num_pages, num_kv_heads, num_layers, 2, page_size, head_dim)`. A page is one
contiguous run of bytes for all layers, so one descriptor moves it. A tensor-parallel rank's share
of a page is one run, too. Attention sees strided views, one a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUT_VERSION = "page-major-head-outer-1"


class KvPool:
    """The pages. They are zeroed at the start. This touches them and leaves no NaN in unused
    tails."""

    def __init__(
        self,
        *,
        num_pages: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_pages, num_kv_heads, num_layers, 2, page_size, head_dim)
        self.tensor = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, and the distance from one page to the next."""
        return self.tensor[0].numel() * self.tensor.element_size()

    def layer_kv(self, layer: int) -> Tensor:
        """K and V of a layer: `(num_pages, num_kv_heads, 2, page_size, head_dim)`, strided."""
        return self.tensor[:, :, layer]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, separately: `(num_pages, num_kv_heads, page_size, head_dim)`,
        strided."""
        return self.tensor[:, :, layer, 0], self.tensor[:, :, layer, 1]

    @property
    def runs(self) -> Tensor:
        """The pool as contiguous runs, `(runs, page_size * head_dim)`. One run is K or V of one
        page, KV head and layer."""
        return self.tensor.view(-1, self.page_size * self.tensor.shape[-1])

    def run_ids(self, pages: Tensor) -> Tensor:
        """Rows of `runs` with K of layer 0, [..., P] int64 -> [..., Hkv, P]. K of a layer is
        further on by `2 * layer` rows, and its V by one more."""
        heads, layers = self.tensor.shape[1:3]
        head = torch.arange(heads, device=pages.device)[:, None]
        return (pages[..., None, :] * heads + head) * (2 * layers)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copies whole pages, all layers: `target[i]` becomes `source[i]`. Both are [N] int64. No
        page may be both a source and a target."""
        self.tensor[target] = self.tensor[source]
