"""A feed-forward of experts, as layers have it.

One of several ranks holds a part of the width of every expert, or some experts whole, and the
router whole. So all ranks choose alike, and their parts of the sum are added once. An expert that
all tokens share is always cut: each rank would wait for the one that had it whole.

Shapes: T tokens of a step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from engine.model.config import ExpertsConfig, ModelConfig
from engine.model.experts.products import mixed
from engine.model.experts.routing import Chosen, route
from engine.model.experts.stacked import Stacked, StackedFp8, StackedInt4, StackedMxfp4
from engine.model.experts.weights import ExpertWeights, Listed
from engine.model.linear import Build, Linear
from engine.model.places import FLOATS, Place, of_linear
from engine.model.precision.base import Format, Get, Kind, TensorSpec, WeightSlice, parameter
from engine.model.precision.choice import Precision
from engine.model.region import Region
from engine.model.shard import Shard

_STACKED = {
    None: Stacked,
    Kind.FP8_CHANNELS: StackedFp8,
    Kind.FP8_BLOCKS: StackedFp8,
    Kind.INT4: StackedInt4,
    Kind.MXFP4: StackedMxfp4,
}


def expert_weights(
    parts: Sequence[Sequence[WeightSlice]], bias: bool, build: Build
) -> ExpertWeights:
    """Memory for the weights of experts, in their precision.

    Args:
        parts: by expert.
        bias: whether modules have biases.
        build: see `Build`.
    """
    precision, inputs = build.precision, parts[0][0].region.columns.size
    if not precision.on_gpu:
        methods = [precision.method(own, inputs, build.device) for own in parts]
        return Listed(parts, methods, bias, build.dtype, build.device)
    scheme = precision.of_experts([part for own in parts for part in own])
    kind = scheme.kind if scheme else None
    return _STACKED[kind](parts, scheme, bias, build.dtype, build.device)


class Experts(nn.Module):
    """See `engine.model.feed_forward.FeedForward`."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        own: ExpertsConfig,
        build: Build,
        shared: nn.Module | None,
    ) -> None:
        """Experts of layer `index`. `shared`: the feed-forward of all tokens, which adds up over no
        ranks."""
        super().__init__()
        self.own = own
        parts = build.shard.expert_parts(config, index, own)
        # Checkpoints keep these as floats, whether or not their descriptions say so.
        plain_build = build._replace(precision=Precision(build.device, build.dtype))
        self.router = Linear(parts.router, own.router_bias, plain_build)
        self.choice_bias = None
        if own.routing.bias:
            self.choice_bias = parameter((own.routing.experts,), torch.float32, build.device)
        self.gate_up = expert_weights(parts.gate_up, own.bias, build)
        self.down = expert_weights(parts.down, own.bias, build)
        self.reduce = self.restore = None
        if (given := own.reduced) is not None:
            sizes = (given.size, config.hidden_size), (config.hidden_size, given.size)
            self.reduce, self.restore = (
                Linear(
                    [WeightSlice(config.layer_name(index, name), Region.whole(*size))], False, build
                )
                for name, size in zip((given.before, given.after), sizes, strict=True)
            )
        self.shared = shared
        self.shared_gate = None
        if own.shared_gate is not None:
            self.shared_gate = Linear(parts.shared_gate, False, plain_build)
        self.held = build.shard.held
        self.dispatch, self.pairs = build.dispatch, build.pairs
        self.dispatch.add(self._without_tokens)
        self._dtype, self._device = build.dtype, build.device
        self._bias_name = config.layer_name(index, own.names.bias)
        self.collective = build.collective

    def forward(self, x: Tensor, chosen: Chosen | None = None) -> Tensor:
        """[T, H] -> [T, H], with the ranks' sum. `chosen`: the experts; None: those of `x`."""
        read = x if self.reduce is None else self.reduce(x)
        out = self._mixed(read, chosen or self.choose(x))
        out = out if self.restore is None else self.restore(out)
        if self.shared is not None:
            out = out + self.common(x, self.shared(x))
        return self.collective.all_reduce(out)

    def _mixed(self, x: Tensor, chosen: Chosen) -> Tensor:
        """The sum over each token's experts, over those of this rank at least."""
        x, *found = self.dispatch.dispatch(x, *chosen)
        weights = self.gate_up, self.down, self.own.gate
        out = mixed(x, Chosen(*found), *weights, self.held, self.pairs)
        return self.dispatch.combine(out)

    def _without_tokens(self) -> None:
        x = torch.empty(0, self.gate_up.inputs, dtype=self._dtype, device=self._device)
        weights = x.new_empty(0, self.own.routing.chosen, dtype=torch.float32)
        self._mixed(x, Chosen(weights, weights.long()))

    def choose(self, x: Tensor) -> Chosen:
        """The experts of [T, H]."""
        return route(self.router(x), self.own.routing, self.choice_bias)

    def common(self, x: Tensor, shared: Tensor) -> Tensor:
        """The shared expert's output, by its gate."""
        if self.shared_gate is None:
            return shared
        return torch.sigmoid(self.shared_gate(x)) * shared

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """See `FeedForward`."""
        yield from of_linear(self.router, None, shard)
        if self.choice_bias is not None:
            spec = TensorSpec(tuple(self.choice_bias.shape), FLOATS)
            fill = partial(_fill_choice_bias, self.choice_bias, self._bias_name)
            yield Place({self._bias_name: spec}, fill)
        for linear in (self.reduce, self.restore):
            if linear is not None:
                yield from of_linear(linear, form, shard)
        for weights in (self.gate_up, self.down):
            yield from _weight_places(weights, form)
            yield from _bias_places(weights, shard)
        if self.shared_gate is not None:
            yield from of_linear(self.shared_gate, None, shard)
        if self.shared is not None:
            yield from self.shared.places(form, shard)  # type: ignore[operator]


def _fill_choice_bias(target: Tensor, name: str, get: Get) -> None:
    """[E], or [1, E] in some checkpoints."""
    target.copy_(get(name).flatten())


def _weight_places(weights: ExpertWeights, form: Format | None) -> Iterator[Place]:
    for expert, parts in enumerate(weights.parts):
        first = 0
        for part in parts:
            where = expert, first, part
            if form is not None and form.scheme(part.module) is not None:
                specs = form.specs(part.module, part.region.shape)
                if part.stack is not None:  # The format does not know how many there are.
                    count = part.stack.experts
                    specs = {name: spec.sized(count) for name, spec in specs.items()}
                yield Place(specs, partial(_fill_quantised, weights, *where, form))
            else:
                yield Place(_float_specs(part), partial(_fill_float, weights, *where))
            first += part.rows


def _float_specs(part: WeightSlice) -> dict[str, TensorSpec]:
    if part.stack is None:
        return {f"{part.module}.weight": TensorSpec(part.region.shape, FLOATS)}
    return {part.stack.tensor: TensorSpec(part.stack.spec(part.region.shape), FLOATS)}


def _fill_float(
    weights: ExpertWeights, expert: int, first: int, part: WeightSlice, get: Get
) -> None:
    region = part.region
    if part.stack is None:
        weight = get(f"{part.module}.weight", region.rows, region.columns)
    else:
        weight = part.stack.read(region, get)
    weights.fill(expert, first, weight)


def _fill_quantised(
    weights: ExpertWeights, expert: int, first: int, part: WeightSlice, form: Format, get: Get
) -> None:
    weights.fill(expert, first, form.read(part.module, part.region, get))


def _bias_places(weights: ExpertWeights, shard: Shard) -> Iterator[Place]:
    """Places of biases. Of a sum over ranks, rank 0 adds the bias."""
    if weights.bias is None:
        return
    for expert, parts in enumerate(weights.parts):
        first = 0
        for part in parts:
            target = weights.bias[expert, first : first + part.rows]
            adds = shard.rank == 0 or part.region.columns.size == part.region.shape[1]
            yield Place(_bias_specs(part), partial(_fill_bias, target, part, adds))
            first += part.rows


def _bias_specs(part: WeightSlice) -> dict[str, TensorSpec]:
    outputs = part.region.shape[0]
    if part.stack is None:
        return {f"{part.module}.bias": TensorSpec((outputs,), FLOATS)}
    shape = part.stack.experts, part.stack.turns * outputs
    return {f"{part.stack.tensor}_bias": TensorSpec(shape, FLOATS)}


def _fill_bias(target: Tensor, part: WeightSlice, adds: bool, get: Get) -> None:
    rows = part.region.rows
    read = part.stack.read_bias(rows, get) if part.stack else get(f"{part.module}.bias", rows)
    target.copy_(read)
    if not adds:
        target.zero_()
