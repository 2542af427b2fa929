"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), of Qwen3-Next and Qwen3.5.

A head's state is a matrix S that maps keys to values. Each token lets it fade, looks up its key,
and moves what it finds towards its own value:

    S = decay * S
    S = S + k (beta * (v - k^T S))^T
    out = q^T S

q, k and v have passed a short causal convolution, and q and k have length 1. Value heads that are
neighbours share a key head. A unit of the state is a key head with its values: the inputs of the
convolution that later tokens read, then the matrices of its value heads.

A prompt is folded in 64 tokens at a time. Within such a block each token's value is corrected by
those before it, which is a triangular system (the WY form: Yang et al. 2024, "Parallelizing Linear
Transformers with the Delta Rule"). So a prompt that is cut behind multiples of 64 has the same
numbers, bit by bit, as one that is not.

Shapes: T tokens of a step, B sequences, L tokens of a prompt, U key heads of this rank, R value
heads of each, Dk and Dv their dimensions, C channels of a unit (its q, k and values), K taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.linear import Build, Linear, RmsNorm
from engine.model.mixers.base import Step
from engine.model.mixers.config import GRID, DeltaConfig
from engine.model.mixers.convolution import convolved, join_state, split_state
from engine.model.places import FLOATS, Place, of_linear, of_norm, plain
from engine.model.precision.base import Format, Get, TensorSpec, WeightSlice, parameter
from engine.model.precision.choice import Precision
from engine.model.region import Range
from engine.model.shard import Shard, columns, stacked
from engine.step.attention import AttentionSpec

EPSILON = 1e-6
"""Is added to the square of the length of q and k, as all implementations do."""


class DeltaParts(NamedTuple):
    """The weights around the rule."""

    inputs: list[WeightSlice]
    """q, k, v and the gate of the output."""
    gates: list[WeightSlice]
    """beta and decay."""
    output: list[WeightSlice]


def parts_of(own: DeltaConfig, config: ModelConfig, index: int, shard: Shard) -> DeltaParts:
    """A rank's parts of the weights of layer `index`."""
    units, shared = shard.even(own.key_heads), own.value_heads // own.key_heads

    def size(of_unit: int) -> tuple[int, Range]:
        return own.key_heads * of_unit, Range(units.start * of_unit, units.end * of_unit)

    def module(name: str) -> str:
        return f"{own.module}.{name}"

    key, value, head = size(own.key_dim), size(own.values), size(shared)
    output = columns(config, index, module("out_proj"), *value)
    if own.by_head:
        both = size(own.channels + own.values)
        inputs = stacked(config, index, [module("in_proj_qkvz")], [both])
        gates = stacked(config, index, [module("in_proj_ba")], [size(2 * shared)])
        return DeltaParts(inputs, gates, output)
    inputs = stacked(config, index, [module("in_proj_qkv")], [key, key, value])
    inputs += stacked(config, index, [module("in_proj_z")], [value])
    names_of_gates = [module("in_proj_b"), module("in_proj_a")]
    return DeltaParts(inputs, stacked(config, index, names_of_gates, [head, head]), output)


class Rule:
    """The convolution and the rule of a layer: `engine.step.attention.Recurrence`. Inputs are
    [T, U, C], the first gates log decays [T, U, R], the second ones beta [T, U, R]; out is
    [T, U, R, Dv]."""

    def __init__(self, own: DeltaConfig, taps: Tensor) -> None:
        """`taps`: [U, C, K], the newest token's last."""
        self._own = own
        self._taps = taps

    def step(
        self, state: Tensor, inputs: Tensor, first: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrence`."""
        before, matrices = self._parts(state)
        window = torch.cat((before, inputs.float()[..., None]), dim=-1)
        q, k, v = self._heads(convolved(window, self._taps).squeeze(-1))
        matrices = matrices * first.float().exp()[..., None, None]
        found = (matrices * k[..., None]).sum(-2)
        change = (v - found) * second.float()[..., None]
        matrices = matrices + k[..., None] * change[..., None, :]
        out = (matrices * q[..., None]).sum(-2)
        return out, join_state(window, self._own.kernel, matrices)

    def fold(
        self, state: Tensor, inputs: Tensor, first: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrence`."""
        before, matrices = self._parts(state)
        window = torch.cat((before, inputs.float().permute(1, 2, 0)), dim=-1)
        q, k, v = self._heads(convolved(window, self._taps).permute(2, 0, 1))
        out, matrices = fold(q, k, v, first.float(), second.float(), matrices)
        return out, join_state(window, self._own.kernel, matrices)

    def _parts(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the K - 1 tokens before, [..., U, C, K - 1], and the matrices,
        [..., U, R, Dk, Dv]."""
        own = self._own
        before, rest = split_state(state, own.channels, own.kernel)
        return before, torch.unflatten(rest, -1, (-1, own.key_dim, own.value_dim))

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., U, C] -> q and k [..., U, 1, Dk], and v [..., U, R, Dv]."""
        own = self._own
        q, k, v = torch.split(mixed, [own.key_dim, own.key_dim, own.values], dim=-1)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
        q = q * own.key_dim**-0.5
        return q.unsqueeze(-2), k.unsqueeze(-2), torch.unflatten(v, -1, (-1, own.value_dim))


def fold(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Folds a prompt into a state, all in float32.

    Args:
        q: [L, U, 1, Dk], of length Dk ** -0.5.
        k: [L, U, 1, Dk], of length 1.
        v: [L, U, R, Dv].
        log_decay: [L, U, R], at most 0.
        beta: [L, U, R].
        state: [U, R, Dk, Dv].

    Returns:
        Out [L, U, R, Dv], and the new state.
    """
    tokens, fill = len(q), -len(q) % GRID
    # Tokens that fill the last block change nothing: their keys and beta are 0, and nothing fades.
    q, k, v, log_decay, beta = (
        F.pad(x, (0, 0) * (x.dim() - 1) + (0, fill)) for x in (q, k, v, log_decay, beta)
    )

    def blocks(x: Tensor) -> Tensor:
        """[N * 64, U, R, ...] -> [N, U, R, 64, ...]."""
        return torch.unflatten(x, 0, (-1, GRID)).movedim(1, 3)

    q, k, v, beta = blocks(q), blocks(k), blocks(v), blocks(beta)[..., None]
    faded = blocks(log_decay).cumsum(-1)
    later = torch.ones(GRID, GRID, dtype=torch.bool, device=q.device).triu(1)
    # [.., i, j]: what is left at token i of what token j has added.
    left = (faded[..., :, None] - faded[..., None, :]).masked_fill(later, -torch.inf).exp()
    system = (beta * (k @ k.mT)) * left
    alike = (q @ k.mT) * left
    since_start, until_end = faded.exp()[..., None], (faded[..., -1:] - faded).exp()[..., None]
    solve = partial(torch.linalg.solve_triangular, system, upper=False, unitriangular=True)
    values, looked_up = solve(beta * v), solve(beta * since_start * k)
    q, k = q * since_start, k * until_end
    whole = faded[..., -1].exp()[..., None, None]
    outs = []
    for at in range(len(q)):
        change = values[at] - looked_up[at] @ state
        outs.append(q[at] @ state + alike[at] @ change)
        state = state * whole[at] + k[at].mT @ change
    out = torch.stack(outs).movedim(3, 1).flatten(0, 1)
    return out[:tokens], state


class DeltaRule(nn.Module):
    """See `engine.model.mixers.base.Mixer`."""

    def __init__(self, config: ModelConfig, index: int, own: DeltaConfig, build: Build) -> None:
        super().__init__()
        self.index = index
        self.own = own
        self._name = config.layer_name(index, own.module)
        self._collective = build.collective
        parts = parts_of(own, config, index, build.shard)
        self.inputs = Linear(parts.inputs, False, build)
        # Checkpoints keep these as floats, and small errors of a decay add up.
        plain_build = build._replace(precision=Precision(build.device, build.dtype))
        self.gates = Linear(parts.gates, False, plain_build)
        self.output = Linear(parts.output, False, build)
        units, shared = build.shard.even(own.key_heads).size, own.value_heads // own.key_heads
        self.taps = parameter((units, own.channels, own.kernel), build.dtype, build.device)
        self.rate = parameter((units, shared), torch.float32, build.device)
        """log of how fast a head fades."""
        self.rate_bias = parameter((units, shared), torch.float32, build.device)
        self.norm = RmsNorm(own.value_dim, config.norm_eps, build)

    @property
    def spec(self) -> AttentionSpec:
        """See `Mixer`."""
        return AttentionSpec(1.0, recurrence=Rule(self.own, self.taps))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """See `Mixer`."""
        inputs, gate = self._inputs(self.inputs(x))
        beta, rate = self._gates(self.gates(x))
        log_decay = -self.rate.exp() * F.softplus(rate.float() + self.rate_bias)
        out = step.attention(self.index, inputs, log_decay, beta.sigmoid())
        normed = self.norm(out.to(x.dtype))
        gated = normed * F.silu(gate.view_as(normed).float())
        return self._collective.all_reduce(self.output(gated.to(x.dtype).flatten(1)))

    def _inputs(self, made: Tensor) -> tuple[Tensor, Tensor]:
        """[T, U, C] of q, k and v, and [T, U, R * Dv] of the gate of the output."""
        own = self.own
        key, value = own.key_dim, own.values
        if own.by_head:
            of_heads = made.view(len(made), -1, own.channels + value)
            inputs, gate = torch.split(of_heads, [own.channels, value], dim=-1)
            return inputs, gate
        units = len(self.rate)
        parts = torch.split(made, [units * size for size in (key, key, value, value)], dim=1)
        q, k, v, gate = (torch.unflatten(part, 1, (units, -1)) for part in parts)
        return torch.cat((q, k, v), dim=-1), gate

    def _gates(self, made: Tensor) -> tuple[Tensor, Tensor]:
        """beta before its sigmoid, and what the decay is made of, [T, U, R] each."""
        units, shared = self.rate.shape
        if self.own.by_head:
            beta, rate = made.view(-1, units, 2, shared).unbind(2)
        else:
            beta, rate = made.view(-1, 2, units, shared).unbind(1)
        return beta, rate

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """See `Mixer`."""
        own, units = self.own, shard.even(self.own.key_heads)
        first, begin = 0, 0
        for width in (own.key_dim, own.key_dim, own.values):
            rows = Range(first + units.start * width, first + units.end * width)
            target = self.taps[:, begin : begin + width]
            yield self._taps_place(target, rows)
            first, begin = first + own.key_heads * width, begin + width
        shared = own.value_heads // own.key_heads
        heads = Range(units.start * shared, units.end * shared)
        for name, tensor in (("A_log", self.rate), ("dt_bias", self.rate_bias)):
            yield plain(f"{self._name}.{name}", tensor.view(-1), heads, own.value_heads)
        yield of_norm(f"{self._name}.norm", self.norm)
        for linear in (self.inputs, self.gates, self.output):
            yield from of_linear(linear, form, shard)

    def _taps_place(self, target: Tensor, rows: Range) -> Place:
        """These rows of all taps, which fill q, k or the values of all units."""
        name, channels = f"{self._name}.conv1d.weight", self.own.key_heads * self.own.channels

        def fill(get: Get) -> None:
            target.copy_(get(name, rows).view(target.shape))

        return Place({name: TensorSpec((channels, 1, self.own.kernel), FLOATS)}, fill)
