"""The noise of `engine.sampling.noise`, made on the device of output indices that are only there.

Bit for bit the same numbers. torch has no uint64: products wrap in int64, which keeps all of their
bits, and shifts copy the sign, so what is shifted is cut to 32 bits.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

_ROUNDS: Final = 10
"""Philox4x32-10's own number."""
_LOW: Final = 0xFFFF_FFFF
"""The lower 32 bits."""
_FIRST: Final = 0xD2511F53
_SECOND: Final = 0xCD9E8D57
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
"""Philox4x32-10's multipliers, and the steps of its keys."""


def uniform(seeds: Tensor, choices: Tensor, indices: Tensor) -> Tensor:
    """One number in (0, 1) for each drawn token; see `engine.sampling.noise.uniform`.

    Args:
        seeds: [R] int64, the bits of the seeds.
        choices: [R] int64.
        indices: [R] int64, output indices.

    Returns:
        [R] float64.
    """
    first, second = indices & _LOW, choices & _LOW
    third = fourth = seeds.new_zeros(())
    keys = seeds & _LOW, (seeds >> 32) & _LOW
    for step in range(_ROUNDS):
        low = (keys[0] + step * _WEYL[0]) & _LOW
        high = (keys[1] + step * _WEYL[1]) & _LOW
        one, two = first * _FIRST, third * _SECOND
        first, third = ((two >> 32) & _LOW) ^ second ^ low, ((one >> 32) & _LOW) ^ fourth ^ high
        second, fourth = two & _LOW, one & _LOW
    mantissa = (first << 20) | (second >> 12)
    return (mantissa.double() + 0.5) * 2.0**-52
