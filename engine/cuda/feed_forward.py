"""A layer's feed-forward with fused kernels, over the modules of `engine.model.feed_forward`.

Another kind has its own case in `reader_of` and `run`.
"""

from __future__ import annotations

from torch import Tensor

from engine.cuda import kernels
from engine.cuda.products.rounding import rounded, silu_mul_rounded
from engine.model.feed_forward import Gated
from engine.model.linear import Linear
from engine.model.precision.rounding import Rounded, Rounding


def reader_of(module: Gated) -> Rounding | None:
    """How it takes its input; None: in the model's dtype."""
    return module.gate_up.method.input


def run(module: Gated, x: Tensor | Rounded) -> Tensor:
    """[T, H] in the form of `reader_of` -> [T, H]."""
    out: Tensor = module.down(gated(x, module.gate_up, module.down.method.input))
    return out


def gated(x: Tensor | Rounded, gate_up: Linear, reader: Rounding | None) -> Tensor | Rounded:
    """silu(gate) * up of [T, H] -> [T, I]."""
    fused = gate_up.method.gated(x) if gate_up.bias is None else None
    if fused is not None:
        return as_read(fused, reader)
    both = gate_up(x)
    return kernels.silu_mul(both) if reader is None else silu_mul_rounded(both, reader)


def as_read(x: Tensor, reader: Rounding | None) -> Tensor | Rounded:
    """In the form that a product takes."""
    return x if reader is None else rounded(x, reader)
