"""A token's experts on a GPU: with `engine.cuda.experts.summing`, what
`engine.model.experts.products.mixed` is elsewhere.

Up to `FEW_ROWS` rows memory limits, and our kernels read the chosen experts. With more rows
arithmetic limits: weights in bfloat16 are PyTorch's `grouped_mm` on Hopper and later, those in FP8
with scales by channel its `scaled_grouped_mm` on Hopper alone. Others are our kernels'. Nothing
waits for the device, so graphs can be captured.
"""

from __future__ import annotations

from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor

from engine.cuda.experts.beside import SharedWeights
from engine.cuda.experts.products import product
from engine.cuda.experts.routing import Order, activate, sort, take
from engine.cuda.experts.summing import Parts
from engine.cuda.products.rounding import rounded
from engine.model.experts.config import Gate
from engine.model.experts.routing import Chosen
from engine.model.experts.stacked import (
    GROUPED_CAPABILITY,
    Stacked,
    capability,
    groups_in_one_kernel,
)
from engine.model.precision.base import Kind
from engine.model.precision.rounding import Rounded, Rounding, plain_of

FEW_ROWS: Final = 256
"""The most rows for which kernels of ours multiply weights that PyTorch can multiply, too."""
_SIXTEEN_BYTES: Final = 16
"""PyTorch's rows of FP8 are multiples of so many values."""
_functional: Any = F
"""PyTorch before 2.10 lacks some of what is used here."""


def parts_of(
    x: Tensor | Rounded,
    chosen: Chosen,
    gate_up: Stacked,
    down: Stacked,
    gate: Gate,
    beside: SharedWeights | None = None,
    ranks: int = 1,
    total: Tensor | None = None,
) -> Parts:
    """What each expert of a token makes of it.

    Args:
        x: [T, H] in the model's dtype, or rounded as `gate_up` wants it, with what it was before.
        chosen: experts (int32) and weights of each token, among the rank's.
        gate_up: to [.., 2 I].
        down: to [.., H].
        gate: what lies between them.
        beside: of one row: the shared expert, whose output is one row more, the last.
        ranks: among which the experts are divided whole.
        total: counts the pairs that are computed here; see `sort`.

    Returns:
        [P, H], to be added up.
    """
    order = sort(chosen.experts, gate_up.shape[0], ranks, total)
    plain = plain_of(x)
    tokens = plain.shape[0]
    if tokens == 1:  # Its products round for themselves.
        first, second = (None, None) if beside is None else beside
        middle = product(plain, gate_up, order, gate=gate, by_token=True, shared=first)
        return Parts(product(middle, down, order, shared=second), order, chosen.weights)
    if tokens > FEW_ROWS and all(_is_grouped(plain, weights) for weights in (gate_up, down)):
        rows = take(_read(x, gate_up.input), order)
        between = activate(_grouped(rows, gate_up, order), gate, order, down.input)
        return Parts(_grouped(between, down, order), order, chosen.weights)
    middle = product(_read(x, gate_up.input), gate_up, order, gate=gate, by_token=True)
    out = product(_read(middle, down.input), down, order)
    return Parts(out, order, chosen.weights)


def _is_grouped(x: Tensor, weights: Stacked) -> bool:
    """Whether PyTorch multiplies groups of rows with such weights in one kernel."""
    if not groups_in_one_kernel(x):
        return False
    if weights.kind is Kind.FP8_CHANNELS:
        whole = all(size % _SIXTEEN_BYTES == 0 for size in weights.shape[1:])
        is_hopper = capability(x.device) == GROUPED_CAPABILITY
        return whole and is_hopper and hasattr(F, "scaled_grouped_mm")
    return weights.kind is None


def _grouped(rows: Tensor | Rounded, weights: Stacked, order: Order) -> Tensor:
    """Products of the pairs' rows, expert by expert."""
    values, ends = weights.values.transpose(1, 2), order.starts[1:]
    if isinstance(rows, Tensor):
        out = F.grouped_mm(rows, values, offs=ends)
    else:
        assert weights.scales is not None
        recipe = _functional.ScalingType.RowWise
        out = _functional.scaled_grouped_mm(
            rows.values, values, rows.scales.flatten(), recipe, weights.scales, recipe,
            offs=ends, output_dtype=weights.dtype, use_fast_accum=True,
        )  # fmt: skip
    if weights.bias is None:
        return out
    # Pairs of other ranks come last, and have no expert here: what they are given is not added.
    experts = order.experts.flatten().index_select(0, order.pairs).clamp_max(len(values) - 1)
    return out + weights.bias.index_select(0, experts)


def _read(x: Tensor | Rounded, how: Rounding | None) -> Tensor | Rounded:
    return x if how is None or isinstance(x, Rounded) else rounded(x, how)
