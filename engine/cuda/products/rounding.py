"""Kernels that leave activations rounded to FP8, as `engine.model.precision.rounding` says.

A product's input is rounded by the kernel that makes it, so it goes through memory once. A value
is first rounded to the model's dtype, as the plain kernels do.

By rows the scale depends on a whole row. The arithmetic of a wide row takes one processor longer
than memory does. So with few rows several programs read the same row for its scale, and each rounds
a part of it.

Scales by groups lie column after column, and a column has space for a multiple of four rows, as
cuBLAS wants them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.cuda.early import early
from engine.cuda.kernels import launch, pieces_of, power_of_2, silu_mul
from engine.model.precision.rounding import E4M3, Rounded, Rounding

_ACTIVATION_BLOCK: Final = 1024
_FEW_ROWS: Final = 64
"""Rows up to which `silu_mul_rounded` by rows is two kernels."""
_PROGRAMS: Final = 264
"""About two for each processor. With half or twice as many, 64 rows of 14,336 take 15 and 22 %
longer; others differ by less than 0.5 us (`bench/README.md`, 2026-11-27)."""
_VALUES_OF_A_WARP: Final = 256
_MOST_WARPS: Final = 32
GIVEN: Final = -1
"""A kernel's `group` where the scale is given."""
PLAIN: Final = tl.constexpr(-2)
"""A kernel's `group` where nothing is rounded."""
_ROWS: Final = 0
"""Instead of a group size: one scale for each row."""


@triton.jit
def scale_of(most):
    """The scale of values whose largest magnitude is `most`."""
    return tl.maximum(tl.div_rn(most, 448.0), 1e-12)


@triton.jit
def e4m3_of(value, scale):
    """Values by scales of the same shape, rounded."""
    value = tl.clamp(tl.div_rn(value, scale), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return value.to(tl.float8e4nv)


@triton.jit
def store_rounded(
    value, most, values, scales, given, row, at, inside, size, stride, group: tl.constexpr
):  # fmt: skip
    """Rounds a part of a row and stores it. Group -1: by the given scale; 0: by the largest
    magnitude `most`; otherwise by that of each group."""
    block: tl.constexpr = value.shape[0]
    if group == -1:
        scale = tl.load(given)
        tl.store(scales + row, scale)
    elif group == 0:
        scale = scale_of(most)
        tl.store(scales + row, scale)
    else:
        parts: tl.constexpr = block // group
        of_parts = tl.max(tl.abs(tl.reshape(value, (parts, group))), axis=1, keep_dims=True)
        of_parts = scale_of(of_parts)
        column = tl.min(at) // group + tl.arange(0, parts)
        places = scales + row + column.to(tl.int64) * stride
        tl.store(places[:, None], of_parts, mask=(column * group < size)[:, None])
        scale = tl.reshape(tl.broadcast_to(of_parts, (parts, group)), (block,))
    value = e4m3_of(value, tl.zeros((block,), tl.float32) + scale)
    tl.store(values + row * size + at, value, mask=inside)


@triton.jit(do_not_specialize=["stride"])
def _norm(
    residual,
    x,
    weight,
    values,
    scales,
    plain,
    given,
    eps,
    size,
    stride,
    adds: tl.constexpr,
    keeps: tl.constexpr,
    pdl: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
):
    if pdl:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    dtype: tl.constexpr = x.dtype.element_ty
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if pdl:
        gdc_wait()
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
        total = value.to(dtype)
        tl.store(residual + row * size + at, total, mask=inside)
        value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    value = (value * scale * gain).to(dtype)
    if keeps:
        tl.store(plain + row * size + at, value, mask=inside)
    value = value.to(tl.float32)
    store_rounded(
        value, tl.max(tl.abs(value)), values, scales, given, row, at, inside, size, stride, group
    )


@triton.jit(do_not_specialize=["stride"])
def _silu_mul(
    gate_up,
    values,
    scales,
    given,
    size,
    stride,
    pdl: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
):
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    dtype: tl.constexpr = gate_up.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    value = (activated * up).to(dtype).to(tl.float32)
    store_rounded(
        value, tl.max(tl.abs(value)), values, scales, given, row, at, inside, size, stride, group
    )


@triton.jit(do_not_specialize=["stride"])
def _round(
    x,
    values,
    scales,
    given,
    size,
    stride,
    pdl: tl.constexpr,
    group: tl.constexpr,
    whole: tl.constexpr,
    block: tl.constexpr,
):
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    most = 0.0
    if group == 0:
        if whole > block:
            every = tl.arange(0, whole)
            every = tl.load(x + row * size + every, mask=every < size, other=0.0)
            most = tl.max(tl.abs(every.to(tl.float32)))
        else:
            most = tl.max(tl.abs(value))
    store_rounded(value, most, values, scales, given, row, at, inside, size, stride, group)


def rms_norm_rounded(x: Tensor, weight: Tensor, eps: float, how: Rounding) -> Rounded:
    """Root mean square norm of [T, H]."""
    return _normed(x, x, weight, eps, how, adds=False)


def add_rms_norm_rounded(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, how: Rounding
) -> Rounded:
    """Adds `x` to `residual` in place; returns the norm of the sum. Both are [T, H]."""
    return _normed(residual, x, weight, eps, how, adds=True)


def silu_mul_rounded(gate_up: Tensor, how: Rounding) -> Rounded:
    """[T, 2 I], gate then up -> [T, I]. By rows with few of them, two kernels are faster."""
    is_few = how.scale is None and how.group is None and gate_up.shape[0] <= _FEW_ROWS
    if is_few or how.keeps:
        return rounded(silu_mul(gate_up), how)
    size = gate_up.shape[1] // 2
    out, stride, group = room(gate_up, size, how)
    block = block_of(size, group)
    grid = (gate_up.shape[0], pieces_of(size, block))
    given = out.scales if how.scale is None else how.scale
    arguments = (gate_up, *out[:2], given, size, stride, early(), group, block)
    launch(_silu_mul, grid, *arguments, num_warps=warps_of(block), launch_pdl=early())
    return out


def rounded(x: Tensor, how: Rounding) -> Rounded:
    """[T, K], contiguous, rounded; for what no kernel of ours has made, such as attention."""
    size = x.shape[1]
    out, stride, group = room(x, size, how)
    block, whole = block_of(size, group), power_of_2(size)
    seen = block
    if group == _ROWS:
        block, seen = _part(whole, x.shape[0]), whole
    grid = (x.shape[0], pieces_of(size, block))
    given = out.scales if how.scale is None else how.scale
    arguments = (x, *out[:2], given, size, stride, early(), group, whole, block)
    launch(_round, grid, *arguments, num_warps=warps_of(seen), launch_pdl=early())
    return out._replace(plain=x) if how.keeps else out


def _normed(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, how: Rounding, *, adds: bool
) -> Rounded:
    size = x.shape[1]
    out, stride, group = room(x, size, how)
    block = power_of_2(size)
    given = out.scales if how.scale is None else how.scale
    plain = torch.empty_like(x) if how.keeps else x
    arguments = (residual, x, weight, *out[:2], plain, given, eps, size, stride)
    known = adds, how.keeps, early(), group, block
    launch(_norm, (x.shape[0],), *arguments, *known, num_warps=warps_of(block), launch_pdl=early())
    return out._replace(plain=plain) if how.keeps else out


def room(x: Tensor, size: int, how: Rounding) -> tuple[Rounded, int, int]:
    """Room for a result, the stride of its scales' columns, and the kernels' `group`."""
    rows = x.shape[0]
    values = torch.empty(rows, size, dtype=E4M3, device=x.device)
    if how.scale is not None or how.group is None:
        scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
        return Rounded(values, scales), 1, _ROWS if how.scale is None else GIVEN
    if size % how.group:
        raise ValueError(f"rows of {size} values cannot be cut into groups of {how.group}")
    column = -(-rows // 4) * 4
    scales = torch.empty(size // how.group, column, dtype=torch.float32, device=x.device)
    return Rounded(values, scales[:, :rows].t()), column, how.group


def block_of(size: int, group: int) -> int:
    """Values of a program, where a row need not be one's."""
    whole: int = power_of_2(size)
    return whole if group == _ROWS else min(whole, _ACTIVATION_BLOCK)


def _part(whole: int, rows: int) -> int:
    """Values of a row that a program rounds, so that few rows, too, have many programs."""
    parts = max(1, _PROGRAMS // rows)
    return max(min(whole, _ACTIVATION_BLOCK), whole >> (parts.bit_length() - 1))


def warps_of(block: int) -> int:
    """Warps of a program with so many values."""
    return max(1, min(_MOST_WARPS, block // _VALUES_OF_A_WARP))
