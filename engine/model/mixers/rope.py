"""Rotary position embedding (Su et al. 2021).

Shapes: T tokens of a step, D head dimension, R numbers of a head that are rotated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

BLOCK = 1 << 14
"""Positions of a table that are computed at once. Their angles are float32, in a few copies."""


class Growth(NamedTuple):
    """A factor on queries: 1 + strength * log(1 + floor(position / positions)) (Llama 4)."""

    strength: float
    positions: int

    def at(self, positions: Tensor) -> Tensor:
        """[T] -> [T] float32."""
        return 1.0 + self.strength * torch.log1p(torch.floor(positions.float() / self.positions))


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of the first R numbers of a head."""

    frequencies: tuple[float, ...]
    """[R / 2] inverse frequencies, with scaling."""
    scale: float = 1.0
    """Factor on cos and sin (yarn)."""
    neighbours: bool = False
    """Numbers 2 i and 2 i + 1 of a head are turned together; else i and R / 2 + i."""
    growth: Growth | None = None
    """Growth of the queries that are rotated; None: they stay as they are."""


class Rotation(NamedTuple):
    """Cosines and sines of the T tokens of a step."""

    cos: Tensor
    """[T, 1, R]"""
    sin: Tensor
    growth: Tensor | None
    """[T, 1, 1]"""


Rotations = Mapping[Rope | None, Rotation]
"""By the ropes of the layers."""


class Ropes(nn.Module):
    """The rotations of all layers."""

    def __init__(self, ropes: Iterable[Rope | None], device: torch.device) -> None:
        super().__init__()
        self.frequencies = {
            rope: torch.tensor(rope.frequencies, device=device)
            for rope in dict.fromkeys(ropes)
            if rope
        }

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotations:
        """At [T] positions."""
        return {
            rope: Rotation(
                *self.rotation(rope, positions, dtype),
                rope.growth and rope.growth.at(positions).to(dtype)[:, None, None],
            )
            for rope in self.frequencies
        }

    def rotation(self, rope: Rope, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin of one rope, [T, 1, R] each."""
        angles = positions.float()[:, None] * self.frequencies[rope]
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * rope.scale).to(dtype), (angles.sin() * rope.scale).to(dtype)

    def fill(self, rope: Rope, table: Tensor) -> None:
        """Writes cos and sin of the pairs at the first positions into [positions, 2, R / 2]."""
        for start in range(0, len(table), BLOCK):
            block = table[start : start + BLOCK]
            positions = torch.arange(start, start + len(block), device=table.device)
            for row, found in enumerate(self.rotation(rope, positions, table.dtype)):
                block[:, row] = found[:, 0, : len(rope.frequencies)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, neighbours: bool = False) -> Tensor:
    """Rotates the first R numbers of each head of [T, heads, D]; cos and sin are [T, 1, R], those
    of the pairs twice. `neighbours`: as in `Rope`."""
    if (size := cos.shape[-1]) < x.shape[-1]:
        turned = rotate(x[..., :size], cos, sin, neighbours=neighbours)
        return torch.cat((turned, x[..., size:]), dim=-1)
    if neighbours:
        halves = x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        turned = rotate(halves, cos, sin).view(*x.shape[:-1], 2, -1)
        return turned.transpose(-1, -2).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
