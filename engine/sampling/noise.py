"""The noise for drawing tokens. It depends on the token's place and not on a generator's state.

It is based on a counter. So any worker, at any time and in any batch, finds the same number for the
same (seed, choice, output index). A prefill worker draws output index 0 and a decode worker goes on
from 1. A resumed request goes on from its last index.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_ROUNDS = 10
"""Philox4x32-10's own number: with fewer it does not pass the tests of its authors."""
_LOW = np.uint64(0xFFFF_FFFF)
_WORD_BITS = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_ROUND_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL


def philox4x32(counters: U64, keys: U64) -> U64:
    """Philox4x32-10 of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
    (SC'11).

    Args:
        counters: [4, R], each below 2**32.
        keys: [2, R], each below 2**32.

    Returns:
        [4, R], each below 2**32.
    """
    even, odd = counters[0::2], counters[1::2]
    for key in (keys + _ROUND_STEPS) & _LOW:
        product = even * _MULTIPLIERS
        even = (product >> _WORD_BITS)[::-1] ^ odd ^ key
        odd = (product & _LOW)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniform(
    seeds: U64, choices: NDArray[np.integer[Any]], indices: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """One number in the open interval (0, 1) for each drawn token, on a grid of 2**-52.

    The seed is Philox's key; output index and choice are the low words of its counter, and the
    high words stay zero.

    Args:
        seeds: [R], any uint64.
        choices: [R], which of a request's choices, from 0.
        indices: [R], index of the token in the choice's whole output, from 0.

    Returns:
        [R] float64.
    """
    counters = np.zeros((4, len(seeds)), np.uint64)
    counters[0], counters[1] = indices, choices
    keys = np.stack([seeds & _LOW, seeds >> _WORD_BITS])
    words = philox4x32(counters, keys)
    mantissa = ((words[0] << _WORD_BITS) | words[1]) >> np.uint64(12)
    # 52 bits plus a half: exact in a float64, and never 0 or 1.
    result: NDArray[np.float64] = (mantissa.astype(np.float64) + 0.5) * 2.0**-52
    return result
