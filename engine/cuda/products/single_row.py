"""Products of one row with a weight of 16 bits. Memory is the only limit of a batch of one.

Each output has one program (or an output of gate and of up, which it activates and multiplies). A
whole row of the weight is loaded at once. Libraries reach the chip's bandwidth only on the largest
weights here, because they tile for matrices.

Loading the first weights while the kernel before still runs, as `one_row` does in FP8, made it
slower: 229 tokens a second instead of 239 on an H200. So only products with few programs do it,
which have room beside others, such as a model's router. All let the next kernel start, which waits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.kernels import launch, power_of_2

_BLOCKS = (2048, 1024, 512)
"""Inputs that are loaded at once. The largest that divides a row is used."""
_WHOLE = 4096
"""Where none divides it: up to so many inputs are loaded at once, and a row's end is masked."""
_WARPS = 4
_FEW_PROGRAMS = 1024
"""Products of so many outputs begin early. Of 128, 256 and 1,024 outputs they take 10, 10 and 11 %
less so; for all weights it made steps slower (`bench/README.md`, 2026-11-27)."""


@triton.jit
def part_of(row, start, inputs: tl.constexpr, block: tl.constexpr):
    """A block of a row in float32. Behind the row's end are zeros."""
    at = start + tl.arange(0, block)
    if inputs % block == 0:
        values = tl.load(row + at)
    else:
        values = tl.load(row + at, mask=at < inputs, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _dot(
    x, weight, bias, out, inputs: tl.constexpr, block: tl.constexpr, has_bias: tl.constexpr,
    pdl: tl.constexpr, ahead: tl.constexpr,
):  # fmt: skip
    """`pdl`: lets the next kernel start. `ahead`: has been started so itself."""
    if pdl:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    acc = tl.zeros((block,), tl.float32)
    begun: tl.constexpr = block if ahead else 0
    if ahead:
        weights = part_of(weight + row * inputs, 0, inputs, block)
        gdc_wait()
        acc += part_of(x, 0, inputs, block) * weights
    for start in range(begun, inputs, block):
        weights = part_of(weight + row * inputs, start, inputs, block)
        acc += part_of(x, start, inputs, block) * weights
    total = tl.sum(acc)
    if has_bias:
        total += tl.load(bias + row).to(tl.float32)
    tl.store(out + row, total)


@triton.jit
def _gated_dot(x, weight, out, outputs, inputs: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    gate_row = weight + row * inputs
    up_row = weight + (row + outputs) * inputs
    gate_acc = tl.zeros((block,), tl.float32)
    up_acc = tl.zeros((block,), tl.float32)
    for start in range(0, inputs, block):
        value = part_of(x, start, inputs, block)
        gate_acc += value * part_of(gate_row, start, inputs, block)
        up_acc += value * part_of(up_row, start, inputs, block)
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.sum(gate_acc).to(dtype).to(tl.float32)
    up = tl.sum(up_acc).to(dtype).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row, activated * up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of [T, inputs]. For T = 1 it uses its own kernel."""
    if x.shape[0] != 1:
        return F.linear(x, weight, bias)
    out = x.new_empty(1, len(weight))
    given = out if bias is None else bias
    ahead = early() and len(weight) <= _FEW_PROGRAMS
    shape = (x.shape[1], block_of(x.shape[1]), bias is not None, early(), ahead)
    arguments = (x, weight, given, out, *shape)
    launch(_dot, (len(weight),), *arguments, num_warps=_WARPS, launch_pdl=ahead)
    return out


def gated(x: Tensor, weight: Tensor) -> Tensor | None:
    """silu(gate) * up of [1, H] -> [1, I] in one kernel, gate and up stacked in the weight. None if
    there is more than one row."""
    if x.shape[0] != 1:
        return None
    outputs = len(weight) // 2
    out = x.new_empty(1, outputs)
    arguments = (x, weight, out, outputs, x.shape[1], block_of(x.shape[1]))
    launch(_gated_dot, (outputs,), *arguments, num_warps=_WARPS)
    return out


def block_of(inputs: int) -> int:
    """Inputs that are loaded at once."""
    whole = min(_WHOLE, power_of_2(inputs))
    return next((block for block in _BLOCKS if inputs % block == 0), whole)
