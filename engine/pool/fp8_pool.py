"""The KV pool in FP8: half the bytes of bfloat16, and no calibration.

A head's bytes have the e4m3 values of its K and V of all layers, then all their exponents
(`engine.pool.fp8_rounding`):

    values     layers x (K [page_size, head_dim], V [head_dim, page_size])
    exponents  layers x 2 x page_size, int8

V lies with its tokens side by side, as the product with the weights reads it. The matrix units take
pairs of tokens, and no instruction transposes bytes. Exponents behind all values keep the strides
of values aligned. So a page, a rank's share of it and a head's share stay one run each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.pool.fp8_rounding import FP8, Rounded, round_rows, widen
from engine.pool.kv_pool import KvPool


class Fp8Pool(KvPool):
    """K and V as e4m3 values with an exponent for each token and head."""

    layout = "page-major-head-outer-e4m3-1"
    gathers = True
    token_multiple = 16

    @property
    def precision(self) -> str:
        """See `KvPool`."""
        return "fp8"

    @property
    def element(self) -> torch.dtype:
        """See `KvPool`."""
        return FP8

    @property
    def stored_bytes(self) -> int:
        """See `KvPool`."""
        return self.head_values + self.num_layers * 2 * self.page_size

    @property
    def planes(self) -> tuple[int, ...]:
        """See `PagePool`: values, and exponents."""
        return self.layer_stride, 2 * self.page_size

    @property
    def exponents(self) -> Tensor:
        """`(num_pages, num_kv_heads, num_layers, 2, page_size)` int8, a strided view."""
        heads = self._heads[..., self.head_values :].view(torch.int8)
        return _split(heads, self.num_layers, 2, self.page_size)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `KvPool`. The numbers lack their exponents."""
        band, layer = self.band_of(layer)
        k, v = band._layer_bytes(layer)
        return k.view(FP8), v.view(FP8)

    def write(
        self, layer: int, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `KvPool`."""
        band, layer = self.band_of(layer)
        stored_k, stored_v = band._layer_bytes(layer)
        exponents_k, exponents_v = band.exponents[:, :, layer].unbind(2)
        at = pages, offsets
        return self._store(stored_k, exponents_k, at, k), self._store(stored_v, exponents_v, at, v)

    def places(self, pages: Tensor) -> Tensor:
        """The pages themselves."""
        return pages

    def gather(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """See `KvPool`."""
        band, layer = self.band_of(layer)
        k, v = band._layer_bytes(layer)
        return band._read(k, layer, 0, places), band._read(v, layer, 1, places)

    def _store(
        self, stored: Tensor, exponents: Tensor, at: tuple[Tensor, Tensor], x: Tensor
    ) -> Tensor:
        """Stores K or V, [T, Hkv, D], and returns it as it is read."""
        (pages, offsets), rounded = at, round_rows(x)
        stored[pages, :, offsets] = rounded.values.view(torch.uint8)
        exponents[pages, :, offsets] = rounded.exponents
        return widen(rounded, self.dtype)

    def _read(self, stored: Tensor, layer: int, kind: int, pages: Tensor) -> Tensor:
        """[..., Hkv, P * page_size, D] of `(num_pages, num_kv_heads, page_size, head_dim)`."""
        exponents = self.exponents[:, :, layer, kind][pages]
        wide = widen(Rounded(stored[pages].view(FP8), exponents), self.dtype)
        return wide.transpose(-4, -3).flatten(-3, -2)

    @property
    def _heads(self) -> Tensor:
        return self.data.view(self.num_pages, self.num_kv_heads, self.head_bytes)

    def _layer_bytes(self, layer: int) -> tuple[Tensor, Tensor]:
        """The bytes of the values of `layer`. Not every operation takes e4m3."""
        size = self.page_size * self.head_dim
        both = self._heads.narrow(-1, layer * self.layer_stride, 2 * size)
        k = _split(both[..., :size], self.page_size, self.head_dim)
        v = _split(both[..., size:], self.head_dim, self.page_size)
        return k, v.transpose(-1, -2)


def _split(x: Tensor, *sizes: int) -> Tensor:
    """A view of [..., N] as [..., *sizes]."""
    return x.view(*x.shape[:-1], *sizes)
