"""An expert that all tokens share, whose weights are like those of the others: kernels of one row
take it as one more of the row's experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from engine.model.config import Activation
from engine.model.experts.config import SILU
from engine.model.experts.layer import Experts
from engine.model.experts.stacked import Stacked
from engine.model.feed_forward import Gated
from engine.model.linear import Linear
from engine.model.precision.base import Kind
from engine.model.precision.dense import Dense
from engine.model.precision.fp8 import Fp8Blocks, Fp8Channels


class Alike(NamedTuple):
    """A weight in the form of one expert's."""

    values: Tensor
    """[N, K]"""
    scales: Tensor | None
    """As `Stacked.scales` of one expert."""


class SharedWeights(NamedTuple):
    """The weights of the shared expert."""

    gate_up: Alike
    down: Alike


def beside_of(module: Experts) -> SharedWeights | None:
    """The shared expert of a layer; None if it differs in size, precision or formula."""
    shared, gate_up, down = module.shared, module.gate_up, module.down
    assert isinstance(shared, Gated)
    assert isinstance(gate_up, Stacked)
    assert isinstance(down, Stacked)
    if module.own.gate != SILU or shared.activation is not Activation.SILU:
        return None
    first, second = _alike(shared.gate_up, gate_up), _alike(shared.down, down)
    return None if first is None or second is None else SharedWeights(first, second)


def _alike(linear: Linear, weights: Stacked) -> Alike | None:
    found = _weight_of(linear, weights.kind)
    if found is None or linear.bias is not None or weights.bias is not None:
        return None
    # A given scale is of one input alone.
    given = (how.scale for how in (linear.method.input, weights.input) if how is not None)
    if found.values.shape != weights.shape[1:] or any(scale is not None for scale in given):
        return None
    return found


def _weight_of(linear: Linear, kind: Kind | None) -> Alike | None:
    match kind, linear.method:
        case None, Dense() as method:
            return Alike(method.weight, None)
        case Kind.FP8_CHANNELS, Fp8Channels() as method:
            return Alike(method.values, method.scales)
        case Kind.FP8_BLOCKS, Fp8Blocks() as method:
            return Alike(method.values, method.scales)
    return None
