"""The sum over a token's experts on a GPU: what `engine.model.experts.products.mixed` is elsewhere.

Up to `FEW_ROWS` rows memory limits, and our kernels read the chosen experts. With more rows
arithmetic limits: plain weights in bfloat16 are PyTorch's `grouped_mm`, where there is one, and
others our kernels'. Nothing waits for the device, so graphs can be captured.
"""

from __future__ import annotations

from typing import Final

import torch.nn.functional as F
from torch import Tensor

from engine.cuda.experts.products import product
from engine.cuda.experts.routing import Order, activate, add_up, sort
from engine.cuda.products.rounding import rounded
from engine.model.experts.config import Gate
from engine.model.experts.routing import Chosen
from engine.model.experts.stacked import Stacked, groups_in_one_kernel
from engine.model.precision.rounding import Rounded, Rounding

FEW_ROWS: Final = 256
"""The most rows for which kernels of ours multiply plain weights."""


def mixed(x: Tensor, chosen: Chosen, gate_up: Stacked, down: Stacked, gate: Gate) -> Tensor:
    """The sum of each token's experts by their weights, added in float32, the best expert first.

    Args:
        x: [T, H] in the model's dtype.
        chosen: experts (int32) and weights of each token.
        gate_up: to [.., 2 I].
        down: to [.., H].
        gate: what lies between them.

    Returns:
        [T, H]
    """
    order = sort(chosen.experts, gate_up.shape[0])
    plain = gate_up.kind is None and down.kind is None
    if len(x) > FEW_ROWS and plain and groups_in_one_kernel(x):
        rows = x.index_select(0, order.pairs // chosen.experts.shape[1])
        middle = activate(_grouped(rows, gate_up, order), gate)
        return add_up(_grouped(middle, down, order), order, chosen.weights)
    middle = product(_read(x, gate_up.input), gate_up, order, gate=gate, by_token=True)
    out = product(_read(middle, down.input), down, order)
    return add_up(out, order, chosen.weights)


def _grouped(rows: Tensor, weights: Stacked, order: Order) -> Tensor:
    out = F.grouped_mm(rows, weights.values.transpose(1, 2), offs=order.starts[1:])
    if weights.bias is None:
        return out
    experts = order.experts.flatten().index_select(0, order.pairs)
    return out + weights.bias.index_select(0, experts)


def _read(x: Tensor, how: Rounding | None) -> Tensor | Rounded:
    return x if how is None else rounded(x, how)
