"""MXFP4 weights: e2m1, with a power of two for each 32 inputs of an output channel.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3 and 6.3. An exponent of 255
means no number, and is refused by the format that reads it.

A weight is exact in bfloat16 and float32, except where its power of two is at an end of their
range.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

MXFP4_GROUP: Final = 32
"""Inputs that share a power of two."""
EXPONENT_BIAS: Final = 127
LARGEST_POWER: Final = 2
"""Largest power of two in e2m1."""
NUMBERS: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the lower three bits of a value. The fourth is the sign."""


def dequantised(values: Tensor, exponents: Tensor) -> Tensor:
    """The weight in float32, [N, K].

    Args:
        values: [N, K] uint8 of 0 to 15.
        exponents: [N, K / 32] uint8, plus 127.
    """
    table = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)], device=values.device)
    numbers = table[values.int()].view(*exponents.shape, -1)
    return torch.ldexp(numbers, exponents.int()[..., None] - EXPONENT_BIAS).flatten(-2)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a float weight [N, K], K a multiple of 32, for dummy weights and tests.

    Returns:
        Values [N, K] and exponents [N, K / 32], as `dequantised` takes them.
    """
    groups = weight.float().reshape(len(weight), -1, MXFP4_GROUP)
    most = groups.abs().amax(2)
    powers = torch.frexp(most).exponent - 1 - LARGEST_POWER
    powers = torch.where(most > 0, powers, -EXPONENT_BIAS).clamp(-EXPONENT_BIAS, EXPONENT_BIAS)
    scaled = torch.ldexp(groups, -powers[:, :, None])
    numbers = torch.tensor(NUMBERS, device=weight.device)
    middles = (numbers[1:] + numbers[:-1]) / 2
    magnitude = scaled.abs()
    # At a middle the even value wins: 0.25 becomes 0, 0.75 becomes 1.
    low, high = (torch.bucketize(magnitude, middles, right=right) for right in (False, True))
    values = torch.where(low % 2 == 0, low, high).to(torch.uint8)
    values |= (scaled < 0).to(torch.uint8) << 3
    return values.flatten(1), (powers + EXPONENT_BIAS).to(torch.uint8)
