"""The protocols of the precision room: schemes, formats, methods.

1. A *format* reads the checkpoint's own description and says, for each module, its *scheme*.
2. For each `Linear`, `engine.model.precision.choice` picks a *method* by scheme and device.
3. The loader hands the method one part of its weight after the other: `fill`. A part is a float
   tensor or a `Quantised` one. The method keeps it in its own form at once.
4. `finish` makes the weight ready for products. From then on only products read it.

Shapes: N output channels, K input channels, T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine.model.precision.rounding import Rounded, Rounding
from engine.model.region import Range, Region

BLOCK = 128
"""Channels of a block of an FP8 weight, in either direction, and of a group of its input."""


class Kind(Enum):
    """What the values of a quantised weight are."""

    FP8_CHANNELS = "fp8"
    """e4m3, a scale for each output channel."""
    FP8_BLOCKS = "fp8 in blocks"
    """e4m3, a scale for each 128 x 128."""
    INT4 = "int4"
    """0 to 15, a scale (and a zero point) for each group of inputs of an output channel."""
    MXFP4 = "mxfp4"
    """e2m1, a power of two for each 32 inputs of an output channel."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint keeps one module's weight."""

    kind: Kind
    group: int = 0
    """INT4: inputs of a group, which share a scale; 0: all inputs of a channel."""
    static_input: bool = False
    """FP8_CHANNELS: the checkpoint has the scale of the input."""
    float_input: bool = False
    """FP8: the input is not rounded. No product does that, so such a weight is widened."""


class Quantised(NamedTuple):
    """A weight [N, K], or some rows of one, in few bits."""

    values: Tensor
    """[N, K] e4m3; INT4 and MXFP4: uint8 of 0 to 15."""
    scales: Tensor
    """float32: [N, 1] (FP8_CHANNELS), [N / 128, K / 128], rounded up (FP8_BLOCKS), [N, K / group]
    (INT4). MXFP4: [N, K / 32] uint8, the exponents plus 127."""
    zero_points: Tensor | None = None
    """INT4: [N, K / group] uint8, the value that means 0; None: 8."""
    input_scale: Tensor | None = None
    """Scalar float32 if the scheme says `static_input`."""


class TensorSpec(NamedTuple):
    """What a format expects of one tensor of the checkpoint."""

    shape: tuple[int, ...]
    """-1: any size."""
    dtypes: tuple[torch.dtype, ...]
    other: tuple[int, ...] | None = None
    """Another shape that is as good."""

    def sized(self, size: int) -> TensorSpec:
        """Returns the spec with this size where any is."""
        return self._replace(shape=tuple(size if one == -1 else one for one in self.shape))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor may have this shape. Sizes of 1 do not count: libraries write one scale
        as [] or [1], and scales of channels as [N] or [N, 1]."""
        if -1 in self.shape:
            pairs = zip(shape, self.shape, strict=False)
            return len(shape) == len(self.shape) and all(one == -1 or one == a for a, one in pairs)
        found = _without_ones(shape)
        return found == _without_ones(self.shape) or (
            self.other is not None and found == _without_ones(self.other)
        )


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


class Get(Protocol):
    """Reads tensors of a checkpoint."""

    def __call__(self, name: str, *where: Range) -> Tensor:
        """A tensor by its full name, or the places `where` of its first dimensions."""
        ...


class Format(Protocol):
    """How a checkpoint writes quantised weights. It is made from the checkpoint's description, and
    refuses what it does not know before any weight is read."""

    name: str

    def scheme(self, module: str) -> Scheme | None:
        """The scheme of a module such as `model.layers.0.self_attn.q_proj`; None: its weight is
        kept as a float tensor `.weight`."""
        ...

    def specs(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """The tensors of a quantised module with a weight of `shape` [N, K], by full name.

        Raises:
            UnsupportedModelError: the shape does not fit the scheme.
        """
        ...

    def read(self, module: str, region: Region, get: Get) -> Quantised:
        """Reads a part of a quantised module's weight, which cuts no block and no group. `get`
        reads its tensors, in an order that does not depend on the part.

        Raises:
            ModelError: a scale is not finite or not positive.
            UnsupportedModelError: the weight is written in a way that is not supported.
        """
        ...

    def is_unused(self, name: str) -> bool:
        """Whether the checkpoint may hold this tensor though no product needs it, such as a scale
        of the KV cache."""
        ...

    def is_zero(self, name: str) -> bool:
        """Whether such a tensor must hold zeros, since the product that has it adds nothing."""
        ...


class Kernels(Protocol):
    """Products by kernels for one device, which methods use instead of PyTorch's where there are
    any. `out` is the dtype of the result."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T, K] by [N, K] -> [T, N]."""
        ...

    def gated(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """silu(gate) * up of one row, gate and up stacked in the weight; None: it cannot."""
        ...

    def fp8_linear(
        self,
        values: Tensor,
        scales: Tensor,
        x: Tensor | Rounded,
        how: Rounding,
        bias: Tensor | None,
        out: torch.dtype,
    ) -> Tensor:
        """Values [N, K] with scales [N], and x with scales by row; or with scales
        [N / 128, K / 128], and x with scales by group. `how`: x is rounded, or will be."""
        ...

    def fp8_gated(
        self, values: Tensor, scales: Tensor, x: Rounded, out: torch.dtype
    ) -> Tensor | None:
        """As `gated`, with values, scales and x of either product in FP8."""
        ...


class Method(nn.Module, ABC):
    """Owns the storage and the product of one `Linear`."""

    input: Rounding | None = None
    """How its input is rounded; None: it takes the model's dtype. Whoever makes the input on a GPU
    rounds it if it can. What is not rounded, the product rounds."""

    @abstractmethod
    def fill(self, first_row: int, part: Tensor | Quantised) -> None:
        """Takes the rows of the weight from `first_row` on, and quantises a float part if need
        be."""

    def finish(self, kernels: Kernels | None = None) -> None:
        """Makes the filled weight ready. `kernels`: products of this device; None: PyTorch's."""

    @abstractmethod
    def product(self, x: Tensor | Rounded, bias: Tensor | None) -> Tensor:
        """[T, K] in the form of `input`, or in the model's dtype -> [T, N]."""

    def gated(self, x: Tensor | Rounded) -> Tensor | None:
        """silu(gate) * up in one kernel, where there is one; None: there is none."""
        return None


def parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory for weights, not filled."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Stack(NamedTuple):
    """A float tensor [E, K, turns x N] that holds a weight of every expert, transposed. Its bias is
    [E, turns x N]."""

    tensor: str
    experts: int
    expert: int
    """Whose weight it is."""
    turn: int = 0
    turns: int = 1
    """Several parts lie in turns: channel 0 of each, then channel 1 of each."""
    behind: bool = False
    """They lie one behind the other instead."""
    straight: bool = False
    """So they do, and the weights are not transposed: [E, turns x N, K]."""

    def spec(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """The tensor's shape, for a weight of this shape [N, K]."""
        if self.straight:
            return self.experts, self.turns * shape[0], shape[1]
        return self.experts, shape[1], self.turns * shape[0]

    def read(self, region: Region, get: Get) -> Tensor:
        """A part of the weight, [rows, columns]."""
        one = Range(self.expert, self.expert + 1)
        if self.behind or self.straight:
            first = self.turn * region.shape[0]
            rows = Range(first + region.rows.start, first + region.rows.end)
            if self.straight:
                return get(self.tensor, one, rows, region.columns)[0]
            return get(self.tensor, one, region.columns, rows)[0].T
        return get(self.tensor, one, region.columns, self._turns(region.rows))[
            0, :, self.turn :: self.turns
        ].T

    def read_bias(self, rows: Range, get: Get) -> Tensor:
        """A part of the bias, [rows]."""
        one = Range(self.expert, self.expert + 1)
        return get(f"{self.tensor}_bias", one, self._turns(rows))[0, self.turn :: self.turns]

    def _turns(self, rows: Range) -> Range:
        return Range(rows.start * self.turns, rows.end * self.turns)


class WeightSlice(NamedTuple):
    """Rows of a fused weight that are one module of the checkpoint, or a rank's part of one."""

    module: str
    region: Region
    """What is kept of the module's weight."""
    stack: Stack | None = None
    """Where the float weight and the bias lie, if they are part of a larger tensor."""

    @property
    def rows(self) -> int:
        """Rows that are kept."""
        return self.region.rows.size
