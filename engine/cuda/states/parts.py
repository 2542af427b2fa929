"""Parts of the kernels of states."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)), also where exp(x) is small beside 1."""
    small = tl.exp(-tl.abs(x))
    series = small * (1.0 - small * (0.5 - small * (0.33333333 - 0.25 * small)))
    return tl.maximum(x, 0.0) + tl.where(small < 0.02, series, tl.log(1.0 + small))


@triton.jit
def silu(x):
    """x * sigmoid(x)"""
    return x * tl.sigmoid(x)


@triton.jit
def source_of(
    channel,
    unit,
    q_first, q_stride, k_first, k_stride, v_first, v_stride, shared_by,
    q_channel: tl.constexpr, k_channel: tl.constexpr, v_channel: tl.constexpr,
    key_dim: tl.constexpr,
):  # fmt: skip
    """Where a token's row has the inputs of a unit's channels."""
    owner = unit // shared_by
    source = v_first + unit * v_stride + channel - v_channel
    is_q = (channel >= q_channel) & (channel < q_channel + key_dim)
    is_k = (channel >= k_channel) & (channel < k_channel + key_dim)
    source = tl.where(is_q, q_first + owner * q_stride + channel - q_channel, source)
    return tl.where(is_k, k_first + owner * k_stride + channel - k_channel, source)
