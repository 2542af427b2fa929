"""Weights of all experts in one tensor, as kernels of a GPU read them.

What a checkpoint has is kept as it is, each expert's weight row by row: FP8 values a byte each,
INT4 and MXFP4 two values in a byte, the first one low. Nothing is put into another order, so an
expert is written to its place as soon as it is read, and there is no second copy.

Shapes: E experts, N output channels and K input channels of an expert, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.experts.weights import ExpertWeights
from engine.model.precision import int4, mxfp4
from engine.model.precision.base import BLOCK, Kind, Quantised, Scheme, WeightSlice, parameter
from engine.model.precision.dense import dequantised
from engine.model.precision.fp8 import quantised_by_block, quantised_by_channel
from engine.model.precision.rounding import Rounding, restored

GROUPED_CAPABILITY: Final = (9, 0)
"""Compute capability of GPUs on which PyTorch multiplies groups of rows in one kernel."""


class Stacked(ExpertWeights):
    """The memory of all experts. A subclass says how values are written."""

    kind: Kind | None = None
    """None: in the model's dtype."""
    values: Tensor
    """[E, N, K], or [E, N, K / 2] where a byte holds two."""
    scales: Tensor | None
    zero_points: Tensor | None

    def __init__(
        self,
        parts: Sequence[Sequence[WeightSlice]],
        scheme: Scheme | None,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(parts, bias, dtype, device)
        self.dtype = dtype
        self.device = device
        self.group = scheme.group if scheme else 0
        self.shape = len(parts), self.outputs, self.inputs
        self.register_parameter("scales", None)
        self.register_buffer("zero_points", None, persistent=False)
        self._allocate(scheme)

    def _allocate(self, scheme: Scheme | None) -> None:
        self.values = parameter(self.shape, self.dtype, self.device)

    def fill(self, expert: int, first_row: int, part: Tensor | Quantised) -> None:
        """See `ExpertWeights`."""
        wide = dequantised(part) if isinstance(part, Quantised) else part
        self.values[expert, first_row : first_row + len(wide)].copy_(wide)

    def finish(self) -> None:
        """Nothing is left to do."""

    def weight(self, expert: int) -> Tensor:
        """An expert's weight, [N, K], as it is or in float32."""
        return self.values[expert]

    def product(self, x: Tensor, counts: Tensor) -> Tensor:
        """See `ExpertWeights`. Waits for the device, but for plain weights on Hopper and later."""
        if self.input is not None:
            x = restored(self.input(x)).to(x.dtype)
        if self.kind is None and groups_in_one_kernel(x):
            ends = counts.cumsum(0).int()
            out = F.grouped_mm(x, self.values.transpose(1, 2), offs=ends)
        else:
            out = x.new_empty(len(x), self.outputs)
            first = 0
            for expert, rows in enumerate(torch.split(x, counts.tolist())):
                if len(rows):
                    weight = self.weight(expert).to(x.dtype)
                    out[first : first + len(rows)] = F.linear(rows, weight)
                    first += len(rows)
        return (
            out
            if self.bias is None
            else out + self.bias.repeat_interleave(counts, 0, output_size=len(x))
        )


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU. PyTorch takes microseconds to say it, and each layer asks."""
    return torch.cuda.get_device_capability(device)


def groups_in_one_kernel(x: Tensor) -> bool:
    """Whether PyTorch multiplies groups of such rows without waiting for the device."""
    return (
        hasattr(F, "grouped_mm")
        and x.dtype == torch.bfloat16
        and x.device.type == "cuda"
        and capability(x.device) >= GROUPED_CAPABILITY
    )


class StackedFp8(Stacked):
    """e4m3 with scales by channel or by blocks of 128 x 128."""

    scales: Tensor
    input_scale: Tensor

    def _allocate(self, scheme: Scheme | None) -> None:
        assert scheme is not None
        self.kind = scheme.kind
        experts, outputs, inputs = self.shape
        blocks = scheme.kind is Kind.FP8_BLOCKS
        shape = (experts, outputs // BLOCK, inputs // BLOCK) if blocks else (experts, outputs)
        self.values = parameter(self.shape, torch.float8_e4m3fn, self.device)
        self.scales = parameter(shape, torch.float32, self.device)
        self.input = Rounding(group=BLOCK if blocks else None)
        if scheme.static_input:
            self.input_scale = parameter((1,), torch.float32, self.device)
            self.input_scale.zero_()
            self.input = Rounding(scale=self.input_scale)

    def fill(self, expert: int, first_row: int, part: Tensor | Quantised) -> None:
        """See `ExpertWeights`. Of input scales, the largest of all experts holds."""
        blocks = self.kind is Kind.FP8_BLOCKS
        if isinstance(part, Tensor):
            part = quantised_by_block(part) if blocks else quantised_by_channel(part)
        self.values[expert, first_row : first_row + len(part.values)].copy_(part.values)
        first = first_row // BLOCK if blocks else first_row
        scales = part.scales if blocks else part.scales[:, 0]
        self.scales[expert, first : first + len(scales)].copy_(scales)
        if self.input is not None and self.input.scale is not None:
            given = part.input_scale
            scale = torch.ones(()) if given is None else given  # A dummy weight has none.
            self.input_scale.copy_(torch.maximum(self.input_scale, scale.to(self.device)))

    def weight(self, expert: int) -> Tensor:
        """See `Stacked`."""
        scales = self.scales[expert]
        scales = scales if self.kind is Kind.FP8_BLOCKS else scales[:, None]
        return dequantised(Quantised(self.values[expert], scales))


class StackedInt4(Stacked):
    """0 to 15, with a scale in the model's dtype for each group of inputs."""

    kind = Kind.INT4
    scales: Tensor

    def _allocate(self, scheme: Scheme | None) -> None:
        experts, outputs, inputs = self.shape
        self.group = self.group or inputs
        packed, groups = (experts, outputs, inputs // 2), (experts, outputs, inputs // self.group)
        self.values = parameter(packed, torch.uint8, self.device)
        self.scales = parameter(groups, self.dtype, self.device)

    def fill(self, expert: int, first_row: int, part: Tensor | Quantised) -> None:
        """See `ExpertWeights`. Zero points take a byte each, from the first that is not 8 on."""
        if isinstance(part, Tensor):
            part = int4.quantised(part.to(self.device), self.group, self.dtype)
        rows = slice(first_row, first_row + len(part.values))
        self.values[expert, rows] = int4.pack_pairs(part.values.to(self.device))
        self.scales[expert, rows] = part.scales.to(self.device, self.dtype)
        points = part.zero_points
        if points is None or bool((points == int4.MIDDLE).all()):
            return
        if self.zero_points is None:
            self.zero_points = torch.full_like(self.scales, int4.MIDDLE, dtype=torch.uint8)
        self.zero_points[expert, rows] = points.to(self.device)

    def weight(self, expert: int) -> Tensor:
        """See `Stacked`."""
        points = None if self.zero_points is None else self.zero_points[expert]
        parts = Quantised(_unpacked(self.values[expert]), self.scales[expert].float(), points)
        return dequantised(parts)


class StackedMxfp4(Stacked):
    """e2m1, with an exponent for each 32 inputs."""

    kind = Kind.MXFP4
    scales: Tensor

    def _allocate(self, scheme: Scheme | None) -> None:
        experts, outputs, inputs = self.shape
        self.group = mxfp4.MXFP4_GROUP
        packed, groups = (experts, outputs, inputs // 2), (experts, outputs, inputs // self.group)
        self.values = parameter(packed, torch.uint8, self.device)
        self.scales = parameter(groups, torch.uint8, self.device)

    def fill(self, expert: int, first_row: int, part: Tensor | Quantised) -> None:
        """See `ExpertWeights`."""
        if isinstance(part, Tensor):
            part = Quantised(*mxfp4.quantised(part.to(self.device)))
        rows = slice(first_row, first_row + len(part.values))
        self.values[expert, rows] = int4.pack_pairs(part.values.to(self.device))
        self.scales[expert, rows] = part.scales.to(self.device)

    def weight(self, expert: int) -> Tensor:
        """See `Stacked`."""
        return mxfp4.dequantised(_unpacked(self.values[expert]), self.scales[expert])


def _unpacked(pairs: Tensor) -> Tensor:
    """[N, K / 2] -> [N, K]."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
