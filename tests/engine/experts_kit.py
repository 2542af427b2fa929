"""Random experts in every precision, and what float64 makes of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor

from engine.model.config import ExpertsConfig, GatedConfig, LayerConfig, ModelConfig
from engine.model.experts.config import Gate, Held, Routing
from engine.model.experts.layer import Experts
from engine.model.experts.routing import Chosen
from engine.model.experts.stacked import Stacked, StackedFp8, StackedInt4, StackedMxfp4
from engine.model.experts.weights import ExpertWeights, Listed
from engine.model.feed_forward import feed_forward
from engine.model.linear import Build, Linear
from engine.model.precision import int4, mxfp4
from engine.model.precision.base import Format, Kernels, Kind, Quantised, Scheme, WeightSlice
from engine.model.precision.choice import Precision
from engine.model.precision.dense import dequantised
from engine.model.precision.fp8 import quantised_by_block, quantised_by_channel
from engine.model.precision.rounding import restored
from engine.model.region import Region
from engine.model.shard import Shard
from engine.step.collective import Alone

__all__ = ["Linear"]

CPU = torch.device("cpu")
PRECISIONS: dict[str, tuple[type[Stacked], Scheme | None]] = {
    "float": (Stacked, None),
    "fp8": (StackedFp8, Scheme(Kind.FP8_CHANNELS)),
    "fp8-static": (StackedFp8, Scheme(Kind.FP8_CHANNELS, static_input=True)),
    "fp8-blocks": (StackedFp8, Scheme(Kind.FP8_BLOCKS)),
    "int4": (StackedInt4, Scheme(Kind.INT4, group=32)),
    "int4-zeros": (StackedInt4, Scheme(Kind.INT4, group=64)),
    "int4-channel": (StackedInt4, Scheme(Kind.INT4)),
    "mxfp4": (StackedMxfp4, Scheme(Kind.MXFP4, group=32)),
}
BLOCKED = ("fp8-blocks",)
"""Precisions whose sizes are multiples of 128."""


def written(precision: str, weight: Tensor, dtype: torch.dtype, expert: int) -> Tensor | Quantised:
    """A weight as a checkpoint of this precision holds it."""
    scheme = PRECISIONS[precision][1]
    match scheme.kind if scheme else None:
        case Kind.FP8_CHANNELS:
            given = torch.tensor(0.01 + 0.002 * expert) if scheme and scheme.static_input else None
            return quantised_by_channel(weight)._replace(input_scale=given)
        case Kind.FP8_BLOCKS:
            return quantised_by_block(weight)
        case Kind.INT4:
            part = int4.quantised(weight, scheme.group if scheme else 0, dtype)
            if precision == "int4-zeros":
                points = torch.randint(5, 12, part.scales.shape, dtype=torch.uint8)
                part = part._replace(zero_points=points)
            return part
        case Kind.MXFP4:
            return Quantised(*mxfp4.quantised(weight))
    return weight


def parts_of(
    experts: int, names: tuple[str, ...], outputs: int, inputs: int
) -> list[list[WeightSlice]]:
    """Whole modules of all experts."""
    region = Region.whole(outputs, inputs)
    return [[WeightSlice(f"experts.{e}.{name}", region) for name in names] for e in range(experts)]


class Known(NamedTuple):
    """Filled weights, and what they stand for."""

    weights: ExpertWeights
    exact: list[Tensor]
    """By expert, [N, K] float64."""


class OneScheme:
    """A format in which all modules are alike."""

    name = "one"

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    def scheme(self, _module: str) -> Scheme:
        return self._scheme


def stacked(
    precision: str, parts: list[list[WeightSlice]], dtype: torch.dtype, bias: bool
) -> Known:
    """As a GPU keeps them."""
    kind, scheme = PRECISIONS[precision]
    return filled(kind(parts, scheme, bias, dtype, CPU), precision, dtype)


def listed(precision: str, parts: list[list[WeightSlice]], dtype: torch.dtype, bias: bool) -> Known:
    """As a CPU keeps them."""
    scheme = PRECISIONS[precision][1]
    form = cast("Format", OneScheme(scheme)) if scheme else None
    chooser, inputs = Precision(CPU, dtype, form), parts[0][0].region.shape[1]
    methods = [chooser.method(own, inputs, CPU) for own in parts]
    return filled(Listed(parts, methods, bias, dtype, CPU), precision, dtype)


def filled(weights: ExpertWeights, precision: str, dtype: torch.dtype) -> Known:
    """Filled with random numbers, expert by expert."""
    exact = []
    for expert, own in enumerate(weights.parts):
        rows: list[Tensor] = []
        for part in own:
            weight = torch.randn(part.region.shape).mul_(0.2).to(dtype).float()
            kept = written(precision, weight, dtype, expert)
            weights.fill(expert, sum(map(len, rows)), kept)
            rows.append(dequantised(kept) if isinstance(kept, Quantised) else kept)
        exact.append(torch.cat(rows).double())
    if weights.bias is not None:
        weights.bias.normal_(0, 0.3)
    weights.finish()
    return Known(weights, exact)


def of_rank(weights: Stacked, which: Held) -> Stacked:
    """Those of the experts that a rank holds."""
    own, places = copy.copy(weights), list(which.of(len(weights.parts)))
    own._parameters, own._buffers = dict(own._parameters), dict(own._buffers)
    own.parts = [weights.parts[at] for at in places]
    own.shape = len(places), *weights.shape[1:]
    for name in ("values", "scales", "zero_points", "bias"):
        tensor = getattr(weights, name)
        if tensor is not None:
            setattr(own, name, parameter_like(tensor[places].contiguous()))
    return own


def parameter_like(tensor: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


@contextmanager
def no_numbers() -> Iterator[None]:
    """Memory that nobody has written is no number."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def exact(
    x: Tensor, chosen: Chosen, gate_up: Known, down: Known, gate: Gate, dtype: torch.dtype
) -> Tensor:
    """The sum of a token's experts in float64, with inputs and middles rounded as weights say."""
    out = torch.zeros(len(x), down.weights.outputs, dtype=torch.float64)
    for expert in range(len(gate_up.exact)):
        tokens, places = torch.where(chosen.experts == expert)
        if len(tokens) == 0:
            continue
        opening, up = _one(x[tokens], gate_up, expert).to(dtype).double().chunk(2, 1)
        if gate.limit is not None:
            opening, up = opening.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        middle = opening * torch.sigmoid(gate.sharpness * opening) * (up + gate.shift)
        weighed = _one(middle.to(dtype), down, expert) * chosen.weights[tokens, places, None]
        out.index_add_(0, tokens, weighed)
    return out


def _one(x: Tensor, known: Known, expert: int) -> Tensor:
    how = known.weights.input
    taken = x.double() if how is None else restored(how(x)).double()
    out = taken @ known.exact[expert].T
    bias = known.weights.bias
    return out if bias is None else out + bias[expert].double()


def random_choice(tokens: int, experts: int, chosen: int, kind: str = "any") -> Chosen:
    """`kind`: any; "one": all tokens take the same experts; "few": some experts have no token."""
    open_ones = chosen if kind == "one" else max(chosen, experts // 2) if kind == "few" else experts
    found = torch.stack([torch.randperm(open_ones)[:chosen] for _ in range(tokens)])
    return Chosen(torch.rand(tokens, chosen), found + (experts - open_ones))


def layer(shared: bool, routing: Routing) -> Experts:
    """A feed-forward of experts with random weights, hidden size 64."""
    module = _layer(64, 32, routing, 32 if shared else 0, Precision(CPU, torch.float32))
    for parameter in module.parameters():
        parameter.normal_(0, 0.2)
    return module


def filled_layer(precision: str, routing: Routing, kernels: Kernels, shared: int) -> Experts:
    """As a GPU keeps it: a shared expert of such a width, others of 128, hidden size 512."""
    scheme = PRECISIONS[precision][1]
    form = cast("Format", OneScheme(scheme)) if scheme else None
    new_gpu = mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0))
    with mock.patch.object(Precision, "on_gpu", True), new_gpu:
        module = _layer(512, 128, routing, shared, Precision(CPU, torch.float32, form))
    for each in (module.gate_up, module.down):
        filled(each, precision, torch.float32)
    for linear in (each for each in module.modules() if isinstance(each, Linear)):
        kept = precision if linear.method.input is not None else "float"
        shape = sum(part.rows for part in linear.parts), linear.parts[0].region.columns.size
        weight = torch.randn(shape).mul_(0.2)
        linear.method.fill(0, written(kept, weight, torch.float32, 0))
        linear.method.finish(kernels)
    return module


def _layer(hidden: int, width: int, routing: Routing, shared: int, precision: Precision) -> Experts:
    own = ExpertsConfig(
        width,
        routing,
        shared=GatedConfig(shared) if shared else None,
        shared_gate="mlp.shared_expert_gate" if shared else None,
    )
    config = ModelConfig("", 64, hidden, 1e-6, 64, (LayerConfig(None, own),))
    build = Build(torch.float32, CPU, precision, Shard(), Alone())
    module = feed_forward(config, 0, own, build)
    assert isinstance(module, Experts)
    return module
