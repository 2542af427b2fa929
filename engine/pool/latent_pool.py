"""The pool of layers that keep one latent of each token, and neither K nor V of heads.

The order is `(num_pages, heads, num_layers, page_size, D)`, mostly of one head. A row of D numbers
is K of the absorbed form, which all query heads read: the latent, then the part that is rotated. V
is the latent alone. So every byte is read for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.pool.kv_pool import KvPool


class LatentPool(KvPool):
    """Latents in the model's own dtype."""

    layout = "page-major-latent-1"

    def __init__(self, *, values: int, **shape: Any) -> None:
        """`values`: numbers of a latent without the part that is rotated. `shape`: see
        `KvPool`."""
        self.values = values
        super().__init__(**shape)

    def divide(self, layers: Sequence[int]) -> None:
        """See `KvPool`. Layers follow each other anyway, since there is one head."""

    @property
    def element(self) -> torch.dtype:
        """See `KvPool`."""
        return self.dtype

    @property
    def stored_bytes(self) -> int:
        """See `KvPool`."""
        return self.head_values * self.dtype.itemsize

    @property
    def layer_stride(self) -> int:
        """From one layer's latents to the next's, in stored numbers."""
        return self.page_size * self.head_dim

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KvPool`. V is a part of K."""
        shape = self.num_layers, self.page_size, self.head_dim
        latents = self.elements.view(self.num_pages, self.num_kv_heads, *shape)[:, :, layer]
        return latents, latents[..., : self.values]

    def write(
        self, layer: int, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `KvPool`. `v` is not read, since it is a part of `k`."""
        self.layer(layer)[0][pages, :, offsets] = k
        return k, k[..., : self.values]

    def places(self, pages: Tensor) -> Tensor:
        """Runs of layer 0, [..., Hkv, P]. A run is a page's latents of one layer; those of a layer
        are further on by as many runs."""
        head = torch.arange(self.num_kv_heads, device=pages.device)[:, None]
        return (pages[..., None, :] * self.num_kv_heads + head) * self.num_layers

    def gather(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `KvPool`. V is a part of K."""
        runs = self.elements.view(-1, self.page_size * self.head_dim)
        found = runs.index_select(0, places.reshape(-1) + layer)
        latents = found.view(*places.shape[:-1], -1, self.head_dim)
        return latents, latents[..., : self.values]
