"""Products with weights, and norms: what layers are built of.

Shapes: T tokens of a step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.experts.counting import PairCount
from engine.model.precision.base import WeightSlice, parameter
from engine.model.precision.choice import Precision
from engine.model.precision.rounding import Rounded, Rounding
from engine.model.shard import Shard
from engine.step.collective import Collective
from engine.step.dispatch import STAY, Dispatch


class Build(NamedTuple):
    """What the parts of a model are built with."""

    dtype: torch.dtype
    device: torch.device
    precision: Precision
    shard: Shard
    collective: Collective
    dispatch: Dispatch = STAY
    pairs: PairCount | None = None


class Addition(Protocol):
    """What adds to a product (`engine.model.adapters`)."""

    @property
    def active(self) -> bool:
        """Whether it adds anything in the step that runs."""
        ...

    def __call__(self, x: Tensor | Rounded, linear: Linear) -> Tensor:
        """[T, inputs] -> [T, outputs]: the product `linear.multiply`, and what is added."""
        ...


class Linear(nn.Module):
    """A product with a weight, which is one or several modules of a checkpoint."""

    def __init__(self, parts: Sequence[WeightSlice], bias: bool, build: Build) -> None:
        super().__init__()
        self.parts = parts
        self.method = build.precision.method(parts, parts[0].region.columns.size, build.device)
        outputs = sum(part.rows for part in parts)
        self.bias = parameter((outputs,), build.dtype, build.device) if bias else None
        self.addition: Addition | None = None

    def forward(self, x: Tensor | Rounded) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        if self.addition is None or not self.adds:
            return self.multiply(x)
        return self.addition(x, self)

    def multiply(self, x: Tensor | Rounded) -> Tensor:
        """The product alone, [T, inputs] -> [T, outputs]."""
        return self.method.product(x, self.bias)

    @property
    def reads(self) -> Rounding | None:
        """How it takes its input in the step that runs; None: in the model's dtype."""
        how = self.method.input
        return how._replace(keeps=True) if how is not None and self.adds else how

    @property
    def adds(self) -> bool:
        """Whether adapters add to it in the step that runs."""
        return self.addition is not None and self.addition.active


class RmsNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), perhaps of what is left without the mean.

    Gains of 1 + weight are kept in float32, because 16 bits would round the sum.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        build: Build,
        *,
        plus_one: bool = False,
        centred: bool = False,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.centred = centred
        """It subtracts the mean first."""
        self.plus = 1.0 if plus_one else 0.0
        """What is added to the checkpoint's weight."""
        dtype = torch.float32 if plus_one else build.dtype
        self.weight = parameter((size,), dtype, build.device)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises over the last dimension."""
        if self.centred:
            weight = self.weight.float()
            return F.layer_norm(x.float(), weight.shape, weight, None, self.eps).to(x.dtype)
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
