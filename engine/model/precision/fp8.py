"""FP8 weights and FP8 inputs: e4m3 times e4m3, summed in float32, then scaled.

On a GPU the values take a byte each. On a CPU they are kept in the model's dtype, in which every
e4m3 is exact: that is as fast as a plain weight, and rounds inputs as a GPU does.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.precision.base import BLOCK, Kernels, Method, Quantised, parameter
from engine.model.precision.dense import dequantised
from engine.model.precision.packing import pack, product
from engine.model.precision.rounding import (
    Rounded,
    Rounding,
    restored,
    round_rows,
    rounded_by,
    scale_of,
)

LEAST_CAPABILITY = (8, 9)
"""Compute capability of GPUs whose matrix units take FP8."""


def quantised_by_channel(weight: Tensor) -> Quantised:
    """Rounds a float weight [N, K] with a scale for each output channel."""
    return Quantised(*round_rows(weight)[:2])


def quantised_by_block(weight: Tensor) -> Quantised:
    """Rounds a float weight [N, K], both multiples of 128, with a scale for each 128 x 128."""
    rows, inputs = weight.shape
    blocks = weight.view(rows // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scales = scale_of(blocks.abs().amax((1, 3)))
    values = rounded_by(blocks, scales[:, None, :, None])
    return Quantised(values.view(rows, inputs), scales)


class _Fp8(Method):
    """FP8 values with scales, and the kernels that `finish` was given, if any."""

    values: nn.Parameter
    scales: Tensor
    input: Rounding

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._kernels: Kernels | None = None

    def finish(self, kernels: Kernels | None = None) -> None:
        """See `Method`."""
        self._kernels = kernels
        if kernels is None:
            self.values = pack(self.values)

    def product(self, x: Tensor | Rounded, bias: Tensor | None) -> Tensor:
        """See `Method`."""
        if self._kernels is None:
            return self._plain(x if isinstance(x, Rounded) else self.input(x), bias)
        return self._kernels.fp8_linear(self.values, self.scales, x, self.input, bias, self._dtype)

    def gated(self, x: Tensor | Rounded) -> Tensor | None:
        """See `Method`."""
        if self._kernels is None or not isinstance(x, Rounded):
            return None
        return self._kernels.fp8_gated(self.values, self.scales, x, self._dtype)

    @abstractmethod
    def _plain(self, x: Rounded, bias: Tensor | None) -> Tensor:
        """The product without kernels of ours."""


class Fp8Channels(_Fp8):
    """A scale for each output channel. Inputs have a scale by row, or one that the checkpoint
    gives. Parts of a fused weight share their input, so the largest of their scales holds."""

    input_scale: Tensor

    def __init__(
        self,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        on_gpu: bool,
        static_input: bool,
    ) -> None:
        super().__init__(dtype)
        kept = torch.float8_e4m3fn if on_gpu else dtype
        self.values = parameter((outputs, inputs), kept, device)
        self.scales = parameter((outputs,), torch.float32, device)
        self.input = Rounding()
        if static_input:
            self.input_scale = parameter((1,), torch.float32, device)
            self.input_scale.zero_()
            self.input = Rounding(scale=self.input_scale)

    def fill(self, first_row: int, part: Tensor | Quantised) -> None:
        """See `Method`."""
        if isinstance(part, Tensor):
            part = quantised_by_channel(part)
        rows = slice(first_row, first_row + len(part.values))
        self.values[rows].copy_(part.values)
        self.scales[rows].copy_(part.scales[:, 0])
        if self.input.scale is not None:
            given = part.input_scale
            scale = torch.ones(()) if given is None else given  # A dummy weight has none.
            self.input_scale.copy_(torch.maximum(self.input_scale, scale.to(self.scales.device)))

    def _plain(self, x: Rounded, bias: Tensor | None) -> Tensor:
        if self.values.dtype == torch.float8_e4m3fn:
            return scaled_rows(self.values, self.scales, x, bias, self._dtype)
        sums = product(x.values.to(self._dtype), self.values).float()
        sums *= x.scales * self.scales
        return (sums if bias is None else sums + bias).to(self._dtype)


class Fp8Blocks(_Fp8):
    """A scale for each 128 x 128 of the weight, and for each 128 inputs of a row."""

    input = Rounding(group=BLOCK)

    def __init__(
        self,
        outputs: int,
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        on_gpu: bool,
    ) -> None:
        super().__init__(dtype)
        if on_gpu:
            self.values = parameter((outputs, inputs), torch.float8_e4m3fn, device)
            blocks = (outputs // BLOCK, inputs // BLOCK)
            self.scales = parameter(blocks, torch.float32, device)
        else:  # With its scales in it, since those change along a sum.
            self.values = parameter((outputs, inputs), dtype, device)

    def fill(self, first_row: int, part: Tensor | Quantised) -> None:
        """See `Method`. `first_row` is a multiple of 128."""
        if isinstance(part, Tensor):
            part = quantised_by_block(part)
        rows = slice(first_row, first_row + len(part.values))
        if self.values.dtype != torch.float8_e4m3fn:
            self.values[rows].copy_(dequantised(part))
            return
        self.values[rows].copy_(part.values)
        first = first_row // BLOCK
        self.scales[first : first + len(part.scales)].copy_(part.scales)

    def _plain(self, x: Rounded, bias: Tensor | None) -> Tensor:
        weight: Tensor = self.values
        if weight.dtype == torch.float8_e4m3fn:  # A GPU whose kernels are PyTorch's.
            weight = dequantised(Quantised(self.values, self.scales)).to(self._dtype)
        return product(restored(x).to(self._dtype), weight, bias)


def scaled_rows(
    values: Tensor, scales: Tensor, x: Rounded, bias: Tensor | None, out: torch.dtype
) -> Tensor:
    """PyTorch's product of FP8 values [N, K] with scales [N] and of x [T, K] by row."""
    by_row = x.scales.contiguous()
    if hasattr(F, "scaled_mm"):
        recipe = F.ScalingType.RowWise
        sums = F.scaled_mm(
            x.values,
            values.t(),
            by_row,
            recipe,
            scales[None],
            recipe,
            output_dtype=out,
            use_fast_accum=True,
        )
    else:
        sums = torch._scaled_mm(
            x.values,
            values.t(),
            scale_a=by_row,
            scale_b=scales[None],
            out_dtype=out,
            use_fast_accum=True,
        )
    return sums if bias is None else sums + bias
