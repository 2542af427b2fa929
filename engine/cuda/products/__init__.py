"""Products on a GPU: a kernel of our own where a library's is slower."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cuda.products import fp8, one_row, single_row, sixteen_bits, unrounded_row
from engine.cuda.products.rounding import rounded
from engine.model.precision.rounding import Rounded, Rounding


class CudaProducts:
    """See `engine.model.precision.base.Kernels`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels`."""
        return sixteen_bits.linear(x, weight, bias)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """See `Kernels`."""
        return single_row.gated(x, weight)

    def fp8_linear(
        self,
        values: Tensor,
        scales: Tensor,
        x: Tensor | Rounded,
        how: Rounding,
        bias: Tensor | None,
        out: torch.dtype,
    ) -> Tensor:
        """See `Kernels`."""
        if isinstance(x, Tensor):
            if (cut := unrounded_row.cut_of(values, len(x))) is not None:
                return unrounded_row.product(values, scales, x, how, bias, out, cut)
            x = rounded(x, how)
        linear = fp8.fp8_linear if scales.dim() == 1 else fp8.fp8_block_linear
        return linear(values, scales, x, bias, out)

    def fp8_gated(
        self, values: Tensor, scales: Tensor, x: Rounded, out: torch.dtype
    ) -> Tensor | None:
        """See `Kernels`."""
        cut = one_row.cut_of(x.values)
        return None if cut is None else one_row.fp8_gated(values, scales, x, out, cut)
