"""Products on a CPU, with weights in oneDNN's fastest order.

A plain weight is reordered at each product, or read in its own order. Both cost more than the
arithmetic of a small batch. So float32 weights on a CPU are packed once, after they are loaded. On
two cores SmolLM2's products then take a third to a half of the time at 2 to 32 rows, and nine
tenths at 512.

oneDNN keeps half a megabyte for every number of rows that it has seen, so rows are padded to one of
a few numbers.

A packed weight is opaque. It keeps its shape and says `is_mkldnn`. Only `product` reads it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 32
"""Number of rows for which the order is chosen. An order for a single row is no faster there, and
half as fast with several rows. An order for 512 rows equals this one."""


def pack(weight: nn.Parameter) -> nn.Parameter:
    """The weight, packed if that helps, otherwise unchanged. [outputs, inputs]"""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    can_be = weight.device.type == "cpu" and weight.dtype == torch.float32 and has_onednn
    if not can_be or weight.is_mkldnn:
        return weight
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return nn.Parameter(packed, requires_grad=False)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, inputs] -> [T, outputs]."""
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    rows = len(x)
    filled = F.pad(x, (0, 0, 0, padded(rows) - rows))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(filled, weight, bias, "none", [], "")
    return out[:rows]


def padded(rows: int) -> int:
    """`rows` rounded up to one of 1 to 8, or of four numbers an octave: 10, 12, 14, 16, 20, 24, 28,
    32, 40 ..."""
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step
