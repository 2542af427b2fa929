"""Reads what all formats share: values of four bits, and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.config import ModelError, UnsupportedModelError
from engine.model.region import Range

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of scales."""
A_WORD = 8
"""Values of four bits in an int32."""


def unpacked(words: Tensor) -> Tensor:
    """Values of four bits from int32 words [R, C], the lowest bits first: [R, 8 C] uint8."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def inside(places: Range) -> slice:
    """Where places lie in what the words that they touch hold."""
    first = places.start % A_WORD
    return slice(first, first + places.size)


def positive(scales: Tensor, name: str) -> Tensor:
    """Scales as float32.

    Raises:
        ModelError: one is not finite or not positive.
    """
    scales = scales.float()
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise ModelError(f"{name} holds a scale that is not finite or not positive")
    return scales


def groups(module: str, inputs: int, group: int) -> int:
    """How many groups the inputs of a channel make.

    Raises:
        UnsupportedModelError: they are no multiple of the group.
    """
    if not group:
        return 1
    if inputs % group:
        raise UnsupportedModelError(
            f"{module} has {inputs} inputs, which is no multiple of the group size {group}"
        )
    return inputs // group


def check_words(module: str, what: str, count: int) -> None:
    """Refuses what does not fill its int32 words.

    Raises:
        UnsupportedModelError: it does not.
    """
    if count % A_WORD:
        raise UnsupportedModelError(
            f"{module} has {count} {what}, which is no multiple of the {A_WORD} that an int32 holds"
        )
