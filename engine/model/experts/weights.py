"""The weights of one product of all experts.

Rows of the input lie expert by expert. On a CPU each expert has a `Method` of its own, so every
precision is that of dense products. On a GPU the weights of all experts are one tensor
(`engine.model.experts.stacked`), so that one kernel finds the chosen ones.

Shapes: E experts, N output channels and K input channels of an expert, R rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.model.precision.base import Method, Quantised, WeightSlice, parameter
from engine.model.precision.rounding import Rounding


class ExpertWeights(nn.Module, ABC):
    """Owns the storage and the product."""

    input: Rounding | None = None
    """How its input is rounded; None: it takes the model's dtype."""

    def __init__(
        self,
        parts: Sequence[Sequence[WeightSlice]],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Args:
        parts: by expert, the modules that lie one below the other, those of all experts alike.
        bias: whether modules have biases.
        dtype: the model's.
        device: where the memory is.
        """
        super().__init__()
        self.parts = parts
        self.outputs = sum(part.rows for part in parts[0])
        self.inputs = parts[0][0].region.columns.size
        shape = len(parts), self.outputs
        self.bias = parameter(shape, dtype, device) if bias else None

    @abstractmethod
    def fill(self, expert: int, first_row: int, part: Tensor | Quantised) -> None:
        """Takes rows of an expert's weight from `first_row` on."""

    @abstractmethod
    def finish(self) -> None:
        """Makes the filled weights ready for products by PyTorch."""

    @abstractmethod
    def product(self, x: Tensor, counts: Tensor) -> Tensor:
        """[R, K] -> [R, N].

        Args:
            x: rows of expert 0, then those of expert 1 and so on, in the model's dtype.
            counts: [E] int64, rows of each expert.
        """


class Listed(ExpertWeights):
    """A method for each expert."""

    def __init__(
        self,
        parts: Sequence[Sequence[WeightSlice]],
        methods: Sequence[Method],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(parts, bias, dtype, device)
        self.methods = nn.ModuleList(methods)
        self.input = methods[0].input

    def fill(self, expert: int, first_row: int, part: Tensor | Quantised) -> None:
        """See `ExpertWeights`."""
        self._method(expert).fill(first_row, part)

    def finish(self) -> None:
        """See `ExpertWeights`. Float32 weights are packed, one expert after the other. Where a
        checkpoint has a scale for the input of each expert, the largest holds for all, since a
        token is rounded once."""
        methods = [self._method(expert) for expert in range(len(self.methods))]
        given = [each.input.scale for each in methods if each.input is not None]
        scales = [scale for scale in given if scale is not None]
        if len(scales) == len(methods):
            largest = torch.stack(scales).amax(0)
            for scale in scales:
                scale.copy_(largest)
        for method in methods:
            method.finish()

    def product(self, x: Tensor, counts: Tensor) -> Tensor:
        """See `ExpertWeights`."""
        outs = []
        for expert, rows in enumerate(torch.split(x, counts.tolist())):
            if len(rows):
                bias = None if self.bias is None else self.bias[expert]
                outs.append(self._method(expert).product(rows, bias))
        return torch.cat(outs) if outs else x.new_empty(0, self.outputs)

    def _method(self, expert: int) -> Method:
        method = self.methods[expert]
        assert isinstance(method, Method)
        return method
