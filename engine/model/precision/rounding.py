"""Activations rounded to FP8 (e4m3, Micikevicius et al. 2022) with scales in float32.

A value v becomes the e4m3 number nearest to v / s, ties to even, and stands for that number times
s. The scale s is the largest magnitude of its values, divided by the largest of e4m3. Both
divisions are true ones, so a CPU and a GPU agree in every bit.

A NaN stays one. An infinity becomes NaN, but by a given scale the largest number.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

E4M3: Final = torch.float8_e4m3fn
E4M3_MOST: Final = 448.0
LEAST_SCALE: Final = 1e-12
"""The scale of zeros, by which they can be divided."""
GROUP: Final = 128
"""Values with one scale, where it is not a whole row's."""


class Rounded(NamedTuple):
    """T rows of K values."""

    values: Tensor
    """[T, K] e4m3, contiguous."""
    scales: Tensor
    """float32: [T, 1], contiguous, or [T, K / group] with any strides."""
    plain: Tensor | None = None
    """[T, K], the rows before, where somebody reads those, too."""


class Rounding(NamedTuple):
    """How rows are rounded: each by a scale of its own, unless a field says otherwise."""

    scale: Tensor | None = None
    """One float32, found before by calibration."""
    group: int | None = None
    """Neighbours with a scale of their own; it divides K."""
    keeps: bool = False
    """Whether the rows are also left as they were."""

    def __call__(self, x: Tensor) -> Rounded:
        """[T, K] of any floating type, rounded."""
        if self.scale is not None:
            done = round_static(x, self.scale)
        else:
            done = round_rows(x) if self.group is None else round_groups(x, self.group)
        return done._replace(plain=x) if self.keeps else done


def is_alike(one: Rounding | None, other: Rounding | None) -> bool:
    """Whether both give the same of the same rows."""
    if one is None or other is None:
        return one is other
    return one.group == other.group and one.scale is other.scale


def round_rows(x: Tensor) -> Rounded:
    """[T, K], a scale for each row."""
    scales = _scales(x)
    return Rounded(rounded_by(x, scales), scales)


def round_static(x: Tensor, scale: Tensor) -> Rounded:
    """[T, K] with one scale, which is given. Larger values become the largest of e4m3."""
    scales = scale.float().reshape(1, 1).expand(len(x), 1).contiguous()
    return Rounded(rounded_by(x, scales), scales)


def round_groups(x: Tensor, group: int = GROUP) -> Rounded:
    """[T, K], a scale for each `group` neighbours of a row.

    Raises:
        ValueError: `group` does not divide K.
    """
    rows, size = x.shape
    if size % group:
        raise ValueError(f"rows of {size} values cannot be cut into groups of {group}")
    parts = x.reshape(rows, size // group, group)
    scales = _scales(parts)
    return Rounded(rounded_by(parts, scales).view(rows, size), scales.squeeze(2))


def plain_of(x: Tensor | Rounded) -> Tensor:
    """[T, K], the rows as they were before they were rounded, if they were."""
    if isinstance(x, Tensor):
        return x
    assert x.plain is not None, "its maker was asked to leave them"
    return x.plain


def restored(rounded: Rounded) -> Tensor:
    """[T, K] float32, the values that the rounded ones stand for."""
    values, scales, _ = rounded
    parts = values.float().view(len(values), scales.shape[1], -1)
    return (parts * scales.unsqueeze(2)).view(values.shape)


def scale_of(most: Tensor) -> Tensor:
    """The scale of values whose largest magnitude is `most`, float32."""
    wide = most.float()
    # By a tensor: a GPU would multiply by the inverse of a number, which rounds twice.
    return (wide / torch.full_like(wide, E4M3_MOST)).clamp_min(LEAST_SCALE)


def rounded_by(x: Tensor, scales: Tensor) -> Tensor:
    """x / scales as e4m3."""
    return (x.float() / scales).clamp(-E4M3_MOST, E4M3_MOST).to(E4M3)


def _scales(x: Tensor) -> Tensor:
    """The scale of the last dimension's values, which becomes 1."""
    return scale_of(x.abs().amax(-1, keepdim=True))
