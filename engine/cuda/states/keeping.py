"""What one token reads of the state before it and writes behind itself: the inputs of the short
convolution, matrices and stamps.

Shapes: K taps; columns, K up to a power of two.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from engine.cuda.states.parts import silu
from engine.pool.state_pool import SPOILT, STAMP_NUMBERS

_STAMP = tl.constexpr(STAMP_NUMBERS)
_SPOILT = tl.constexpr(SPOILT)


@triton.jit
def window_of(
    made, numbers, before, channel, source, inside, exists, keeps,
    kernel: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """[channels, columns]: the inputs of the K - 1 tokens before, and of this one. If `exists`
    those are asked for, and if not `keeps` they are zeros."""
    at = tl.arange(0, columns)[None, :]
    there = inside[:, None] & exists & (at < kernel - 1)
    old = tl.load(numbers + before + channel[:, None] * (kernel - 1) + at, mask=there, other=0.0)
    is_new = inside[:, None] & (at == kernel - 1)
    new = tl.load(made + source[:, None] + 0 * at, mask=is_new, other=0.0).to(tl.float32)
    return tl.where(is_new, new, tl.where(keeps, old, 0.0))


@triton.jit
def convolved(
    window, taps, bias, channel, inside,
    kernel: tl.constexpr, columns: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """[channels]"""
    at = tl.arange(0, columns)[None, :]
    there = inside[:, None] & (at < kernel)
    tap = tl.load(taps + channel[:, None] * kernel + at, mask=there, other=0.0).to(tl.float32)
    total = tl.sum(window * tap, 1)
    if has_bias:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return silu(total)


@triton.jit
def keep_window(
    numbers, after, beside, write, saved, window, channel, inside,
    kernel: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """Writes what later tokens read, behind this one."""
    at = tl.arange(0, columns)[None, :]
    there = inside[:, None] & (at > 0) & (at < kernel)
    place = _STAMP + channel[:, None] * (kernel - 1) + at - 1
    if write > 0:
        tl.store(numbers + after + place, window, mask=there)
    if saved > 0:
        tl.store(numbers + beside + place, window, mask=there)


@triton.jit
def keep_stamp(stamps, after, beside, write, saved, is_right, context, spoilt):
    """Says how many tokens are folded in; or that the state is spoilt, also to the host."""
    stamp = tl.where(is_right, context, _SPOILT)
    if write > 0:
        tl.store(stamps + after, stamp)
    if saved > 0:
        tl.store(stamps + beside, stamp)
    if is_right == 0:
        tl.store(spoilt, 1)


@triton.jit
def keep_shared(
    numbers, stamps, after, beside, write, saved, q_window, k_window, q_at, k_at, inside,
    is_right, context, spoilt,
    kernel: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    """What all heads of a unit read."""
    keep_window(numbers, after, beside, write, saved, q_window, q_at, inside, kernel, columns)
    keep_window(numbers, after, beside, write, saved, k_window, k_at, inside, kernel, columns)
    keep_stamp(stamps, after, beside, write, saved, is_right, context, spoilt)


@triton.jit
def keep_state(
    numbers, after, beside, write, saved, place, state, there, is_whole: tl.constexpr
):  # fmt: skip
    """Writes some columns of a matrix."""
    if write > 0:
        if is_whole:
            tl.store(numbers + after + place, state)
        else:
            tl.store(numbers + after + place, state, mask=there)
    if saved > 0:
        tl.store(numbers + beside + place, state, mask=there)
