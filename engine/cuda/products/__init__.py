"""Products on a GPU: a kernel of our own where a library's is slower."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.products import fp8, one_row, single_row
from engine.model.precision.rounding import Rounded


class CudaProducts:
    """See `engine.model.precision.base.Kernels`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels`."""
        return single_row.linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """See `Kernels`."""
        return single_row.gated(x, weight)

    def fp8_linear(
        self, values: Tensor, scales: Tensor, x: Rounded, bias: Tensor | None, out: torch.dtype
    ) -> Tensor:
        """See `Kernels`."""
        return fp8.fp8_linear(values, scales, x, bias, out)

    def fp8_block_linear(
        self, values: Tensor, scales: Tensor, x: Rounded, bias: Tensor | None, out: torch.dtype
    ) -> Tensor:
        """See `Kernels`."""
        return fp8.fp8_block_linear(values, scales, x, bias, out)

    def fp8_gated(
        self, values: Tensor, scales: Tensor, x: Rounded, out: torch.dtype
    ) -> Tensor | None:
        """See `Kernels`."""
        cut = one_row.cut_of(x.values)
        return None if cut is None else one_row.fp8_gated(values, scales, x, out, cut)
