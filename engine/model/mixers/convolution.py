"""The short causal convolution before a recurrence, and the inputs of it that a state has.

Shapes: L tokens, U units of this rank, C channels of a unit, K taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convolved(window: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu of the convolution. Taps are added one by one, so a token's sum does not depend on how
    many tokens there are.

    Args:
        window: [..., U, C, K - 1 + L] float32: the tokens' inputs behind those before them.
        taps: [U, C, K], the newest token's last.
        bias: [U, C].

    Returns:
        [..., U, C, L].
    """
    kernel = taps.shape[-1]
    tokens = window.shape[-1] - kernel + 1
    weights = taps.float()
    out = window[..., :tokens] * weights[..., :1]
    for tap in range(1, kernel):
        out = out + window[..., tap : tap + tokens] * weights[..., tap : tap + 1]
    if bias is not None:
        out = out + bias.float()[..., None]
    return F.silu(out)


def split_state(state: Tensor, channels: int, kernel: int) -> tuple[Tensor, Tensor]:
    """Parts of a unit's numbers, [..., U, N]: the inputs of the K - 1 tokens before,
    [..., U, C, K - 1], and the rest, flat."""
    size = channels * (kernel - 1)
    before = torch.unflatten(state[..., :size], -1, (channels, kernel - 1))
    return before, state[..., size:]


def join_state(window: Tensor, kernel: int, rest: Tensor) -> Tensor:
    """Numbers of a unit: the last K - 1 inputs of a window, and the rest, [..., U, ...]."""
    last = window[..., window.shape[-1] - (kernel - 1) :]
    return torch.cat((last.flatten(-2), rest.flatten(last.dim() - 2)), dim=-1)
