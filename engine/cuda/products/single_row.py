"""Products of one row with a weight of 16 bits. Memory is the only limit of a batch of one.

Each output has one program (or an output of gate and of up, which it activates and multiplies). A
whole row of the weight is loaded at once. Libraries reach the chip's bandwidth only on the largest
weights here, because they tile for matrices.

Loading the first weights while the kernel before still runs, as `one_row` does in FP8, made it
slower: 229 tokens a second instead of 239 on an H200.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch

_BLOCKS = (2048, 1024, 512)
"""Inputs that are loaded at once. The largest that divides a row is used."""
_WARPS = 4


@triton.jit
def _dot(x, weight, out, inputs: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    acc = tl.zeros((block,), tl.float32)
    for start in range(0, inputs, block):
        value = tl.load(x + start + at).to(tl.float32)
        acc += value * tl.load(weight + row * inputs + start + at).to(tl.float32)
    tl.store(out + row, tl.sum(acc))


@triton.jit
def _gated_dot(x, weight, out, outputs, inputs: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    gate_row = weight + row * inputs
    up_row = weight + (row + outputs) * inputs
    gate_acc = tl.zeros((block,), tl.float32)
    up_acc = tl.zeros((block,), tl.float32)
    for start in range(0, inputs, block):
        value = tl.load(x + start + at).to(tl.float32)
        gate_acc += value * tl.load(gate_row + start + at).to(tl.float32)
        up_acc += value * tl.load(up_row + start + at).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    gate = tl.sum(gate_acc).to(dtype).to(tl.float32)
    up = tl.sum(up_acc).to(dtype).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row, activated * up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of [T, inputs]. For T = 1 it uses its own kernel."""
    block = _block(x)
    if not block or bias is not None:
        return F.linear(x, weight, bias)
    out = x.new_empty(1, len(weight))
    launch(_dot, (len(weight),), x, weight, out, x.shape[1], block, num_warps=_WARPS)
    return out


def gated(x: Tensor, weight: Tensor) -> Tensor | None:
    """silu(gate) * up of [1, H] -> [1, I] in one kernel, gate and up stacked in the weight. None if
    there is more than one row, or no size divides it."""
    block = _block(x)
    if not block:
        return None
    outputs = len(weight) // 2
    out = x.new_empty(1, outputs)
    arguments = (x, weight, out, outputs, x.shape[1], block)
    launch(_gated_dot, (outputs,), *arguments, num_warps=_WARPS)
    return out


def _block(x: Tensor) -> int:
    """Inputs that are loaded at once. 0 if there is more than one row, or no size divides it."""
    return 0 if len(x) != 1 else next((b for b in _BLOCKS if x.shape[1] % b == 0), 0)
