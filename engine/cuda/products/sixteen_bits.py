"""Products of weights of 16 bits: which kernel computes one.

One row has a kernel of ours (`engine.cuda.products.single_row`). Few rows of a large weight have
another: memory limits them, and cuBLAS is slower. All else is cuBLAS's.
"""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F
from torch import Tensor

from engine.attention.parts import PROCESSORS
from engine.cuda.early import early
from engine.cuda.products import single_row
from engine.cuda.products.few_rows import Tiles, few_rows

FEW_ROWS: Final = 32
"""The most rows of a product of our own."""
_LEAST_OUTPUTS: Final = 1024
_OUTPUTS: Final = 64
"""Outputs of a program."""
_INPUTS: Final = 256
"""Inputs of a step of the loop."""
_AHEAD: Final = 256
"""Inputs whose weights a program asks for before the launch before it has ended (`Tiles.ahead`)."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of [T, K] with [N, K]."""
    rows, inputs = x.shape
    if rows == 1:
        return single_row.linear(x, weight, bias)
    tiles = tiles_of(weight.shape[0], inputs, rows) if x.element_size() == 2 else None
    if tiles is None:
        return F.linear(x, weight, bias)
    return few_rows(weight, None, x.contiguous(), None, bias, x.dtype, tiles)


def tiles_of(outputs: int, inputs: int, rows: int) -> Tiles | None:
    """How a product of few rows is cut; None: cuBLAS's is faster, or the weight does not suit.

    Measured with the weights of the 8B shape on an H100 (`bench.few_rows` at 333a5305): 64 outputs
    and 256 inputs are the best with every weight or within 2 % of it, with a part of the input for
    each processor where there are fewer tiles. All products of a step of 4 rows take 5.4 ms so, and
    5.9 by cuBLAS.
    """
    if not 1 < rows <= FEW_ROWS or outputs < _LEAST_OUTPUTS or inputs % 8 or not early():
        return None
    parts = min(PROCESSORS // -(-outputs // _OUTPUTS), inputs // (2 * _INPUTS), 8)
    whole = 1 << (max(parts, 1).bit_length() - 1)
    return Tiles(_OUTPUTS, _INPUTS, whole, stages=3, warps=4, ahead=_AHEAD)
