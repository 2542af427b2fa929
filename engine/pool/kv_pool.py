"""The KV pool: one plain allocation of bytes that holds every page of every layer.

The order is `(num_pages, num_kv_heads, bytes of a head)`. A head's bytes have its K and V of all
layers. So a page is one contiguous run, and one descriptor moves it. A tensor-parallel rank's share
of a page is one run, too. A subclass says how numbers are stored in a head's bytes. Attention sees
strided views, one a layer.

A page may have *bands*, one behind the other. Each has some layers, in the order above. So what a
rank shares with one of a pipeline stage, which has these layers alone, is one run, too.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from engine.pool.page_pool import PagePool

EMPTY_HEAD_BYTES = 16
"""Bytes of a head in pages of no layers. Nobody reads them: they are there since transports, tiers
and stores move no empty pages. As many as the smallest piece that is aligned everywhere."""


class KvPool(PagePool, ABC):
    """Pages of K and V. Their layout distinguishes precisions that have the same `dtype`."""

    gathers: ClassVar[bool] = False
    """Whether libraries cannot read the pages in place: prompts that were computed in part are
    gathered into a scratch first."""
    token_multiple: ClassVar[int] = 1
    """Pages must be a multiple of so many tokens."""

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
        data: Tensor | None = None,
    ) -> None:
        """`data` is as in `PagePool`."""
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self.dtype = dtype
        """Dtype of K and V before they are written and after they are read."""
        super().__init__(
            num_pages=num_pages,
            num_layers=num_layers,
            page_bytes=num_kv_heads * self.head_bytes,
            device=device,
            data=data,
        )
        self.elements = self.data.view(self.element)
        """[num_pages, page_stride]: the bytes as stored numbers."""
        self._bands: Sequence[Any] = ()
        """Pools of this one's own kind."""

    def divide(self, layers: Sequence[int]) -> None:
        """Divides each page into bands of so many layers. Nothing is stored yet."""
        assert sum(layers) == self.num_layers, "a layer is in one band"
        self._bands = self._divided(layers) if len(layers) > 1 else ()

    def _divided(self, layers: Sequence[int]) -> list[Self]:
        layer_bytes, found, first = self.num_kv_heads * sum(self.planes), list[Self](), 0
        for count in layers:
            band = copy.copy(self)
            band.num_layers = count
            band.data = self.data.narrow(1, first * layer_bytes, count * layer_bytes)
            band.elements = band.data.view(self.element)
            found.append(band)
            first += count
        return found

    @property
    def bands(self) -> tuple[int, ...]:
        """Layers of each band; empty: there is one."""
        return tuple(band.num_layers for band in self._bands)

    def band_of(self, layer: int) -> tuple[Self, int]:
        """The band of a layer, as a pool without bands whose pages are as far apart as here, and
        the layer's index there."""
        for band in self._bands:
            if layer < band.num_layers:
                return band, layer
            layer -= band.num_layers
        return self, layer

    @property
    def precision(self) -> str:
        """How K and V are stored: a dtype's name or `fp8`."""
        return str(self.element).removeprefix("torch.")

    @property
    @abstractmethod
    def element(self) -> torch.dtype:
        """The dtype of stored numbers."""

    @property
    def head_bytes(self) -> int:
        """Bytes of a KV head in a page: K and V of all layers."""
        return self.stored_bytes or EMPTY_HEAD_BYTES

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes of K and V of all layers; 0 of none."""

    @property
    def planes(self) -> tuple[int, ...]:
        """See `PagePool`."""
        return (self.layer_stride * self.element.itemsize,)

    @property
    def page_stride(self) -> int:
        """From one page to the next, in stored numbers."""
        return self.page_bytes // self.element.itemsize

    @property
    def head_stride(self) -> int:
        """From one KV head to the next, in stored numbers."""
        return self.head_bytes // self.element.itemsize

    @property
    def layer_stride(self) -> int:
        """From one layer's K to the next's, in stored numbers. V is in the middle between."""
        return 2 * self.page_size * self.head_dim

    @property
    def head_values(self) -> int:
        """Stored numbers of a head's K and V of all layers. What a precision adds lies behind."""
        return self.num_layers * self.layer_stride

    @abstractmethod
    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Stored K and V of a layer: `(num_pages, num_kv_heads, page_size, head_dim)`, strided
        views."""

    @abstractmethod
    def write(
        self, layer: int, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stores K and V of T tokens, and returns what a read will give back.

        Args:
            layer: layer of the pool.
            pages: [T] int64.
            offsets: [T] int64, places in the pages.
            k: [T, Hkv, D] of `dtype`.
            v: like `k`.
        """

    @abstractmethod
    def places(self, pages: Tensor) -> Tensor:
        """What `gather` takes for pages [..., P] int64. It serves all layers of a step."""

    @abstractmethod
    def gather(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a layer in P pages, [..., Hkv, P * page_size, D] each, of `dtype`."""

    def by_head(self) -> Self:
        """A view of the same bytes as pages of one KV head each: `num_pages * num_kv_heads` pages,
        those of a page's heads side by side. There are no bands."""
        assert not self._bands, "bytes of a head are not one run"
        view = copy.copy(self)
        view.num_pages, view.num_kv_heads = self.num_pages * self.num_kv_heads, 1
        view.page_bytes = self.head_bytes
        view.data = self.data.view(view.num_pages, view.page_bytes)
        view.elements = view.data.view(self.element)
        return view


class PlainPool(KvPool):
    """K and V in the model's own dtype: `(num_pages, num_kv_heads, num_layers, 2, page_size,
    head_dim)`."""

    layout = "page-major-head-outer-1"

    @property
    def element(self) -> torch.dtype:
        """See `KvPool`."""
        return self.dtype

    @property
    def stored_bytes(self) -> int:
        """See `KvPool`."""
        return self.head_values * self.dtype.itemsize

    @property
    def _stored(self) -> Tensor:
        """`(num_pages, num_kv_heads, num_layers, 2, page_size, head_dim)`."""
        shape = self.num_layers, 2, self.page_size, self.head_dim
        return self.elements.view(self.num_pages, self.num_kv_heads, *shape)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KvPool`."""
        band, layer = self.band_of(layer)
        stored = band._stored
        return stored[:, :, layer, 0], stored[:, :, layer, 1]

    def write(
        self, layer: int, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `KvPool`."""
        band, layer = self.band_of(layer)
        band._stored[:, :, layer][pages, :, :, offsets] = torch.stack((k, v), dim=2)
        return k, v

    def places(self, pages: Tensor) -> Tensor:
        """Runs of K of layer 0, [..., Hkv, P]. A run is K or V of one page, KV head and layer. K of
        a layer is further on by `2 * layer` runs, and its V by one more. With bands: the pages."""
        if self._bands:
            return pages
        head = torch.arange(self.num_kv_heads, device=pages.device)[:, None]
        return (pages[..., None, :] * self.num_kv_heads + head) * (2 * self.num_layers)

    def gather(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `KvPool`."""
        if self._bands:
            k, v = (own[places].transpose(-4, -3).flatten(-3, -2) for own in self.layer(layer))
            return k, v
        runs = self.elements.view(-1, self.page_size * self.head_dim)
        keys = places.reshape(-1) + 2 * layer
        shape = (*places.shape[:-1], -1, self.head_dim)
        both = runs.index_select(0, keys), runs.index_select(0, keys + 1)
        return both[0].view(shape), both[1].view(shape)
