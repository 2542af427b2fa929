"""Products on a CPU, with weights in the order that oneDNN reads them fastest.

A plain weight is reordered at each product, or read as it is: both cost more than the arithmetic of
a small batch. So float32 weights on a CPU are packed once, after they are loaded: beside plain
products, SmolLM2's take a third to a half of the time at 2 to 32 rows on two cores, and nine tenths
at 512.

oneDNN keeps half a megabyte for every number of rows that it has met, so rows are padded to one of
a few numbers.

A packed weight is opaque: it keeps its shape and says `is_mkldnn`, and nothing but `product` reads
it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 32
"""What the order is chosen for. One that is chosen for a single row is no faster there, and half
as fast with several; one for 512 rows equals this."""


def pack(weight: nn.Parameter) -> nn.Parameter:
    """The weight, packed where that is of use; otherwise itself. [outputs, inputs]"""
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
    """The next of 1 to 8, then of four numbers an octave: 10, 12, 14, 16, 20, 24, 28, 32, 40 ..."""
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step
