"""Between two parts of a model whose norms stand elsewhere than Llama's, or that has factors.

All arithmetic is float32. A value is rounded at the same places as in `engine.model.decoder`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels import launch, power_of_2


@triton.jit
def _join(
    residual,
    x,
    after,
    before,
    scalar,
    out,
    eps,
    factor,
    size: tl.constexpr,
    has_after: tl.constexpr,
    scales: tl.constexpr,
    has_scalar: tl.constexpr,
    has_before: tl.constexpr,
    centred: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    inside = at < size
    dtype: tl.constexpr = residual.dtype.element_ty
    value = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
    if has_after:
        scale = tl.rsqrt(tl.sum(value * value) / size + eps)
        gain = tl.load(after + at, mask=inside, other=0.0).to(tl.float32)
        value = (value * scale * gain).to(dtype).to(tl.float32)
    if scales:
        value = (value * factor).to(dtype).to(tl.float32)
    value += tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(dtype)
    if has_scalar:
        rounded = (rounded.to(tl.float32) * tl.load(scalar).to(tl.float32)).to(dtype)
    tl.store(residual + row * size + at, rounded, mask=inside)
    if has_before:
        value = rounded.to(tl.float32)
        if centred:
            value = tl.where(inside, value - tl.sum(value) / size, 0.0)
        scale = tl.rsqrt(tl.sum(value * value) / size + eps)
        gain = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * size + at, value * scale * gain, mask=inside)


def join(
    residual: Tensor,
    x: Tensor,
    after: Tensor | None,
    before: Tensor | None,
    eps: float,
    factor: float,
    scalar: Tensor | None = None,
    *,
    centred: bool = False,
) -> Tensor:
    """Adds the norm of `x`, times a factor, to `residual` in place, and multiplies that by the one
    number in `scalar`; returns the norm of the sum, which overwrites `x`, or the sum itself.
    `after` and `before` are the gains of the norms, None: there is no such norm; `centred`: the
    second one subtracts the mean first. `residual` and `x` are [T, H]."""
    size = x.shape[1]
    given = (residual if each is None else each for each in (after, before, scalar))
    kinds = (after is not None, factor != 1.0, scalar is not None, before is not None, centred)
    block = power_of_2(size)
    launch(_join, (len(x),), residual, x, *given, x, eps, factor, size, *kinds, block)
    return residual if before is None else x
