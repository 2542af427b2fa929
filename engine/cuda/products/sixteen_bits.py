"""Products of weights of 16 bits: which kernel computes one.

One row has a kernel of ours (`engine.cuda.products.single_row`). Few rows of a large weight have
another: memory limits them, and cuBLAS is slower. All else is cuBLAS's.
"""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F
from torch import Tensor

from engine.cuda.early import early
from engine.cuda.products import single_row
from engine.cuda.products.few_rows import Tiles, few_rows

FEW_ROWS: Final = 16
"""The most rows of a product of our own."""
_LEAST_OUTPUTS: Final = 1024
_PROCESSORS: Final = 132
_OUTPUTS: Final = 64
"""Of a program."""
_INPUTS: Final = 128
"""Of a step."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of [T, K] with [N, K]."""
    if len(x) == 1:
        return single_row.linear(x, weight, bias)
    tiles = tiles_of(len(weight), x.shape[1], len(x)) if x.element_size() == 2 else None
    if tiles is None:
        return F.linear(x, weight, bias)
    return few_rows(weight, None, x.contiguous(), None, bias, x.dtype, tiles)


def tiles_of(outputs: int, inputs: int, rows: int) -> Tiles | None:
    """How a product of few rows is cut; None: cuBLAS's is faster, or the weight does not suit."""
    if not 1 < rows <= FEW_ROWS or outputs < _LEAST_OUTPUTS or inputs % 8 or not early():
        return None
    parts = min(2 * _PROCESSORS // -(-outputs // _OUTPUTS), inputs // (2 * _INPUTS))
    return Tiles(_OUTPUTS, _INPUTS, _power_of_two(parts), stages=4, warps=4)


def _power_of_two(parts: int) -> int:
    """The largest that is not above, at most 8."""
    return next((each for each in (8, 4, 2) if parts >= each), 1)
