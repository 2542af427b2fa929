"""The noise of `engine.sampling.noise`, bit for bit, in one kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, pieces_of

_BLOCK = 128
"""Numbers of a program: a batch has some hundred rows."""


@triton.jit
def mantissa_of(seed, index, choice, purpose):
    """The 52 bits that Philox4x32-10 makes of a seed and a place. `purpose` is a word of its
    counter that is 0 for tokens."""
    zero = index.to(tl.uint32) * 0
    counter = index.to(tl.uint32), choice.to(tl.uint32), zero + purpose, zero
    first, second, _, _ = tl.philox(seed, *counter)
    return (first.to(tl.uint64) << 20) | (second.to(tl.uint64) >> 12)


@triton.jit(do_not_specialize=["count"])
def _uniform(seeds, choices, indices, out, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    seed = tl.load(seeds + at, mask=inside, other=0)
    choice = tl.load(choices + at, mask=inside, other=0)
    index = tl.load(indices + at, mask=inside, other=0)
    number = mantissa_of(seed, index, choice, 0).to(tl.float64) + 0.5
    tl.store(out + at, number * 2.220446049250313e-16, mask=inside)  # 2 ** -52


def uniform(seeds: Tensor, choices: Tensor, indices: Tensor) -> Tensor:
    """As `engine.sampling.device_noise.uniform`."""
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    grid = (pieces_of(len(seeds), _BLOCK),)
    launch(_uniform, grid, seeds, choices, indices, out, len(seeds), _BLOCK)
    return out
