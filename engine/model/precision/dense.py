"""Weights in the model's dtype, and quantised ones that are widened to it."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.precision.base import BLOCK, Kernels, Method, Quantised, parameter
from engine.model.precision.int4 import dequantised as dequantised_int4
from engine.model.precision.mxfp4 import dequantised as dequantised_mxfp4
from engine.model.precision.packing import pack, product
from engine.model.precision.rounding import Rounded


class Dense(Method):
    """A plain weight."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter((outputs, inputs), dtype, device)
        self._kernels: Kernels | None = None

    def fill(self, first_row: int, part: Tensor | Quantised) -> None:
        """See `Method`. A quantised part is widened."""
        wide = dequantised(part) if isinstance(part, Quantised) else part
        self.weight[first_row : first_row + len(wide)].copy_(wide)

    def finish(self, kernels: Kernels | None = None) -> None:
        """See `Method`. On a CPU the weight is packed."""
        self._kernels = kernels
        if kernels is None:
            self.weight = pack(self.weight)

    def product(self, x: Tensor | Rounded, bias: Tensor | None) -> Tensor:
        """See `Method`."""
        assert isinstance(x, Tensor)
        if self._kernels is not None:
            return self._kernels.linear(x, self.weight, bias)
        return product(x, self.weight, bias)

    def product_behind(self, x: Tensor, first: int, bias: Tensor | None) -> Tensor:
        """As `product`, of the outputs from `first` on. On a CPU there is none."""
        assert self._kernels is not None, "the weight is not packed"
        return self._kernels.linear(x, self.weight[first:], None if bias is None else bias[first:])

    def gated(self, x: Tensor | Rounded) -> Tensor | None:
        """See `Method`."""
        if self._kernels is None or not isinstance(x, Tensor):
            return None
        return self._kernels.gated(x, self.weight)


def dequantised(part: Quantised) -> Tensor:
    """The weight that a quantised one stands for, [N, K] float32."""
    values = part.values
    if part.scales.dtype == torch.uint8:
        return dequantised_mxfp4(values, part.scales)
    if values.dtype != torch.float8_e4m3fn:
        return dequantised_int4(part)
    return values.float() * _spread(part.scales, values.shape)


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """The scale of each value of an FP8 weight, [N, 1] or [N, K]."""
    if scales.shape == (shape[0], 1):
        return scales
    rows = scales.repeat_interleave(BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, 1)[:, : shape[1]]
