"""Rounding of activations to FP8 (e4m3), in PyTorch. The CUDA kernels give the same bits.

A scale is the largest magnitude divided by 448, the largest e4m3. A value is divided by its scale
in float32 and rounded to the nearest e4m3, ties to even.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST = 448.0
"""The largest finite e4m3."""
LEAST_SCALE = 1e-12
"""Scale of values that are all zero."""


class Rounded(NamedTuple):
    """Activations [T, K] in FP8."""

    values: Tensor
    """[T, K] e4m3."""
    scales: Tensor
    """float32: [T, 1], or [T, K / group]."""


def scale_of(most: Tensor) -> Tensor:
    """The scale of values whose largest magnitude is `most`. float32."""
    return (most.float() / MOST).clamp_min(LEAST_SCALE)


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale as e4m3."""
    return (x.float() / scale).clamp_(-MOST, MOST).to(torch.float8_e4m3fn)


def round_rows(x: Tensor) -> Rounded:
    """Rounds [T, K] with a scale for each row."""
    scales = scale_of(x.abs().amax(1, keepdim=True))
    return Rounded(to_e4m3(x, scales), scales)


def round_static(x: Tensor, scale: Tensor) -> Rounded:
    """Rounds [T, K] with one given scale, [1] float32. Larger values become the largest e4m3."""
    return Rounded(to_e4m3(x, scale), scale.expand(len(x), 1))


def round_groups(x: Tensor, group: int = 128) -> Rounded:
    """Rounds [T, K] with a scale for each `group` values of a row. K must be a multiple of it."""
    parts = x.unflatten(1, (-1, group))
    scales = scale_of(parts.abs().amax(2))
    return Rounded(to_e4m3(parts, scales[:, :, None]).flatten(1), scales)


def restored(rounded: Rounded) -> Tensor:
    """The rounded activations as float32, [T, K]."""
    groups = rounded.scales.shape[1]
    parts = rounded.values.float().unflatten(1, (groups, -1))
    return (parts * rounded.scales[:, :, None]).flatten(1)
