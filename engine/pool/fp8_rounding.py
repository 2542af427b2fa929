"""Rounding of KV to FP8: e4m3 values with one power-of-two exponent for each row of D numbers.

A row is K or V of one token and KV head. Its exponent e is the smallest with `amax / 2**e <= 448`,
where 448 is the largest e4m3 number. A value is `x / 2**e`, rounded to the nearest, ties to even.
`e4m3 * 2**e` has four significant bits, so it is exact in float32, bfloat16 and float16. This is
the block format of Microscaling (Rouhani et al. 2023, arXiv:2310.10537), with a block a head.

A row with NaN or infinity is stored as zeros with the exponent `NO_NUMBER`, and reads as NaN. So no
stored value is a NaN by itself, and kernels may read values that they do not use.

This module is the reference. The kernels of `engine.cuda.fp8kv` give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MOST = 448.0
"""The largest e4m3 number."""


NO_NUMBER = -128
"""The exponent of a row that holds NaN or infinity."""


class Exponents(NamedTuple):
    """Exponents that keep every number of a dtype exact and finite."""

    least: int
    most: int


EXPONENTS = {
    torch.float32: Exponents(-117, 119),
    torch.bfloat16: Exponents(-117, 119),
    torch.float16: Exponents(-15, 7),
}
"""By the dtype of K and V. At the ends 2**-9 * 2**e is exact and 448 * 2**e is finite."""


class Rounded(NamedTuple):
    """Rows of D numbers as they are stored."""

    values: Tensor
    """[..., D] e4m3."""
    exponents: Tensor
    """[...] int8."""


def round_rows(x: Tensor) -> Rounded:
    """Rounds [..., D]. A row of zeros has exponent 0."""
    least, most = EXPONENTS[x.dtype]
    x = x.float()
    amax = x.abs().amax(-1)
    bits = amax.contiguous().view(torch.int32)
    # amax = 1.m * 2**(field - 127), and 448 = 1.75 * 2**8.
    exponents = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).int()
    exponents = torch.where(amax > 0, exponents.clamp(least, most), 0)
    scaled = (x * _power(-exponents)[..., None]).clamp(-MOST, MOST)
    is_number = amax < float("inf")
    scaled = torch.where(is_number[..., None], scaled, 0.0)
    return Rounded(scaled.to(FP8), torch.where(is_number, exponents, NO_NUMBER).to(torch.int8))


def widen(rounded: Rounded, dtype: torch.dtype) -> Tensor:
    """The numbers of rows, [..., D] in `dtype`: e4m3 * 2**e."""
    power = _power(rounded.exponents.int())[..., None]
    return (rounded.values.to(torch.float32) * power).to(dtype)


def _power(exponents: Tensor) -> Tensor:
    """2**e of int32 exponents in [-126, 127], exact in float32; -inf for `NO_NUMBER`."""
    return (exponents + 127 << 23).view(torch.float32)
