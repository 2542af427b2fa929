"""Gates of attention's output. In the product each head of q has its gate behind it.

A value is rounded at the same places as in `engine.model.mixers.attention`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.kernels import launch, pieces_of

_BLOCK: Final = 1024
"""Numbers of a program. Not tuned."""


@triton.jit
def _ungate(made, out, size, gated, dim: tl.constexpr, pdl: tl.constexpr, block: tl.constexpr):
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    source = tl.where(at < gated, at // dim * 2 * dim + at % dim, at + gated)
    value = tl.load(made + token * (size + gated) + source, mask=inside, other=0.0)
    tl.store(out + token * size + at, value, mask=inside)


@triton.jit
def _open(read, made, out, size, made_stride, dim: tl.constexpr, pdl: tl.constexpr,
          block: tl.constexpr):  # fmt: skip
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    source = at // dim * 2 * dim + dim + at % dim
    gate = tl.load(made + token * made_stride + source, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(gate).to(out.dtype.element_ty).to(tl.float32)
    value = tl.load(read + token * size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + at, value * gate, mask=inside)


def ungated(made: Tensor, heads: int, dim: int) -> Tensor:
    """[T, (2 Hq + 2 Hkv) D], contiguous -> [T, (Hq + 2 Hkv) D], without the gates of Hq heads."""
    size = made.shape[1] - heads * dim
    out = made.new_empty(len(made), size)
    grid = len(made), pieces_of(size, _BLOCK)
    arguments = made, out, size, heads * dim, dim, early(), _BLOCK
    launch(_ungate, grid, *arguments, launch_pdl=early())
    return out


def opened(read: Tensor, made: Tensor, dim: int) -> Tensor:
    """What attention gives, [T, Hq * D], contiguous, by the sigmoid of the gates in `made`."""
    out, size = read.new_empty(read.shape), read.shape[1]
    grid = len(read), pieces_of(size, _BLOCK)
    arguments = read, made, out, size, made.stride(0), dim, early(), _BLOCK
    launch(_open, grid, *arguments, launch_pdl=early())
    return out
