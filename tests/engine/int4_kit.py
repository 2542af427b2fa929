"""INT4 weights as a checkpoint has them, and methods filled with them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.precision.base import Kind, Quantised, Scheme, WeightSlice
from engine.model.precision.int4 import Int4
from engine.model.region import Region

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


def drawn(
    n: int, k: int, group: int, zero_points: bool, dtype: torch.dtype = BF16, seed: int = 0
) -> Quantised:
    """A weight as a checkpoint has it. Values of every kind; scales as the dtype has them."""
    generator = torch.Generator().manual_seed(seed + n + k)
    shape = n, k // (group or k)
    values = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(shape, generator=generator) * 0.02 + 0.001).to(dtype).float()
    if not zero_points:
        return Quantised(values, scales)
    zeros = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    return Quantised(values, scales, zeros)


def method_of(
    parts: list[Quantised | Tensor],
    inputs: int,
    group: int,
    device: torch.device = CPU,
    dtype: torch.dtype = BF16,
) -> Int4:
    rows = [len(part.values) if isinstance(part, Quantised) else len(part) for part in parts]
    named = [WeightSlice(f"part{i}", Region.whole(count, inputs)) for i, count in enumerate(rows)]
    method = Int4(Scheme(Kind.INT4, group), named, inputs, dtype, device)
    first = 0
    for part, count in zip(parts, rows, strict=True):
        method.fill(first, part)
        first += count
    return method
