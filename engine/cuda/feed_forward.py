"""A layer's feed-forward with fused kernels, over the modules of `engine.model.feed_forward`.

Another kind has its own case in `reader_of` and `run`.
"""

from __future__ import annotations

from torch import Tensor

from engine.cuda import kernels
from engine.cuda.experts.mixing import parts_of
from engine.cuda.experts.routing import route
from engine.cuda.experts.summing import Parts, add_up
from engine.cuda.products.rounding import rounded, silu_mul_rounded
from engine.model.config import Activation
from engine.model.experts.layer import Experts
from engine.model.experts.stacked import Stacked
from engine.model.feed_forward import Gated
from engine.model.linear import Linear
from engine.model.precision.rounding import Rounded, Rounding


def reader_of(module: Gated | Experts) -> Rounding | None:
    """How it takes its input; None: in the model's dtype."""
    return None if isinstance(module, Experts) else module.gate_up.method.input


def run(module: Gated | Experts, x: Tensor | Rounded) -> Tensor | Parts:
    """[T, H] in the form of `reader_of` -> [T, H], of experts perhaps not added up."""
    if isinstance(module, Experts):
        assert isinstance(x, Tensor)
        return _experts(module, x)
    return _gated(module, x)


def _gated(module: Gated, x: Tensor | Rounded) -> Tensor:
    reader = module.down.method.input
    if module.activation is Activation.SILU:
        middle = gated(x, module.gate_up, reader)
    else:
        by_tanh = module.activation is Activation.GELU_TANH
        middle = kernels.gelu_mul(module.gate_up(x), by_tanh=by_tanh)
    out: Tensor = module.down(middle)
    return out


def _experts(module: Experts, x: Tensor) -> Tensor | Parts:
    """The router reads the model's dtype, so experts round for themselves."""
    assert isinstance(module.gate_up, Stacked)
    assert isinstance(module.down, Stacked)
    chosen = route(module.router(x), module.own.routing, module.choice_bias)
    parts = parts_of(x, chosen, module.gate_up, module.down, module.own.gate)
    if not isinstance(module.shared, Gated):
        return parts
    shared = _gated(module.shared, as_read(x, reader_of(module.shared)))
    return add_up(parts) + module.common(x, shared)


def gated(x: Tensor | Rounded, gate_up: Linear, reader: Rounding | None) -> Tensor | Rounded:
    """silu(gate) * up of [T, H] -> [T, I], perhaps rounded as its reader wants."""
    fused = gate_up.method.gated(x) if gate_up.bias is None else None
    if fused is not None:
        return fused
    both = gate_up(x)
    return kernels.silu_mul(both) if reader is None else silu_mul_rounded(both, reader)


def as_read(x: Tensor, reader: Rounding | None) -> Tensor | Rounded:
    """In the form that a product takes."""
    return x if reader is None else rounded(x, reader)
