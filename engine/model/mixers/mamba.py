"""Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"), of Granite 4 and others.

A head's state is a matrix S. Each token lets it fade by its time step dt, and adds to it:

    S = exp(dt * A) * S + B (dt * x)^T
    out = C^T S + D * x

x, B and C have passed a short causal convolution. Heads that are neighbours share B and C. A unit
of the state has some heads of one group of those: the inputs of the convolution that later tokens
read, with those of B and C, then the matrices. So ranks may divide a group: each unit has B and C
of its own.

A prompt is folded in 64 tokens at a time, so one that is cut behind multiples of 64 has the same
numbers, bit by bit, as one that is not.

Shapes: T tokens of a step, B sequences, L tokens of a prompt, U units of this rank, R heads of
each, P head dimension, N state dimension, G groups of this rank, C channels of a unit, K taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.linear import Build, Linear
from engine.model.mixers.base import Step
from engine.model.mixers.config import GRID, MambaConfig
from engine.model.mixers.convolution import convolved, join_state, split_state
from engine.model.places import FLOATS, Place, of_linear, plain
from engine.model.precision.base import Format, Get, TensorSpec, WeightSlice, parameter
from engine.model.region import Range
from engine.model.shard import Shard, columns, stacked
from engine.step.attention import AttentionSpec


class MambaParts(NamedTuple):
    """The weights around the recurrence."""

    inputs: list[WeightSlice]
    """The gate of the output, x, B, C and the time steps."""
    output: list[WeightSlice]


class _Held(NamedTuple):
    """What a rank has of a layer."""

    heads: Range
    numbers: Range
    """Numbers of these heads."""
    groups: Range


def _held(own: MambaConfig, shard: Shard) -> _Held:
    heads = shard.even(own.heads)
    numbers = Range(heads.start * own.head_dim, heads.end * own.head_dim)
    return _Held(heads, numbers, shard.shared(own.groups))


def parts_of(own: MambaConfig, config: ModelConfig, index: int, shard: Shard) -> MambaParts:
    """A rank's parts of the weights of layer `index`."""
    held, dim = _held(own, shard), own.state_dim
    inner = own.heads * own.head_dim, held.numbers
    group = own.groups * dim, Range(held.groups.start * dim, held.groups.end * dim)
    sizes = [inner, inner, group, group, (own.heads, held.heads)]
    inputs = stacked(config, index, [f"{own.module}.in_proj"], sizes)
    return MambaParts(inputs, columns(config, index, f"{own.module}.out_proj", *inner))


class Scan:
    """The convolution and the recurrence of a layer: `engine.step.attention.Recurrence`. Inputs
    are [T, U, C], the first gates log decays [T, U, R], the second ones time steps [T, U, R]; out
    is [T, U, R, P]."""

    def __init__(self, own: MambaConfig, taps: Tensor, bias: Tensor | None, skip: Tensor) -> None:
        """`taps`: [U, C, K], the newest token's last; `bias`: [U, C]; `skip`: D, [U, R]."""
        self._own = own
        self._taps = taps
        self._bias = bias
        self._skip = skip

    def step(
        self, state: Tensor, inputs: Tensor, first: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrence`."""
        before, matrices = self._parts(state)
        window = torch.cat((before, inputs.float()[..., None]), dim=-1)
        x, b, c = self._heads(convolved(window, self._taps, self._bias).squeeze(-1))
        added = x * second.float()[..., None]
        matrices = matrices * first.float().exp()[..., None, None]
        matrices = matrices + b[..., None] * added[..., None, :]
        out = (matrices * c[..., None]).sum(-2) + x * self._skip[..., None]
        return out, join_state(window, self._own.kernel, matrices)

    def fold(
        self, state: Tensor, inputs: Tensor, first: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Recurrence`."""
        before, matrices = self._parts(state)
        window = torch.cat((before, inputs.float().permute(1, 2, 0)), dim=-1)
        mixed = convolved(window, self._taps, self._bias).permute(2, 0, 1)
        x, b, c = self._heads(mixed)
        out, matrices = fold(c, b, x * second.float()[..., None], first.float(), matrices)
        return out + x * self._skip[..., None], join_state(window, self._own.kernel, matrices)

    def _parts(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the K - 1 tokens before, [..., U, C, K - 1], and the matrices,
        [..., U, R, N, P]."""
        own = self._own
        before, rest = split_state(state, own.channels, own.kernel)
        return before, torch.unflatten(rest, -1, (-1, own.state_dim, own.head_dim))

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., U, C] -> x [..., U, R, P], and B and C, [..., U, 1, N] each."""
        own = self._own
        x, b, c = torch.split(mixed, [own.values, own.state_dim, own.state_dim], dim=-1)
        return torch.unflatten(x, -1, (-1, own.head_dim)), b.unsqueeze(-2), c.unsqueeze(-2)


def fold(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Folds a prompt into a state, all in float32. In the words of attention, q is C, k is B, and v
    is dt * x.

    Args:
        q: [L, U, 1, N].
        k: [L, U, 1, N].
        v: [L, U, R, P].
        log_decay: [L, U, R], at most 0.
        state: [U, R, N, P].

    Returns:
        Out [L, U, R, P], and the new state.
    """
    tokens, fill = len(q), -len(q) % GRID
    # Tokens that fill the last block change nothing: they add 0, and nothing fades.
    q, k, v, log_decay = (
        F.pad(x, (0, 0) * (x.dim() - 1) + (0, fill)) for x in (q, k, v, log_decay)
    )

    def blocks(x: Tensor) -> Tensor:
        """[M * 64, U, R, ...] -> [M, U, R, 64, ...]."""
        return torch.unflatten(x, 0, (-1, GRID)).movedim(1, 3)

    q, k, v = blocks(q), blocks(k), blocks(v)
    faded = blocks(log_decay).cumsum(-1)
    later = torch.ones(GRID, GRID, dtype=torch.bool, device=q.device).triu(1)
    # [.., i, j]: what is left at token i of what token j has added.
    left = (faded[..., :, None] - faded[..., None, :]).masked_fill(later, -torch.inf).exp()
    within = ((q @ k.mT) * left) @ v
    q = q * faded.exp()[..., None]
    added = (k * (faded[..., -1:] - faded).exp()[..., None]).mT @ v
    whole = faded[..., -1].exp()[..., None, None]
    outs = []
    for at in range(len(q)):
        outs.append(within[at] + q[at] @ state)
        state = state * whole[at] + added[at]
    return torch.stack(outs).movedim(3, 1).flatten(0, 1)[:tokens], state


class Mamba(nn.Module):
    """See `engine.model.mixers.base.Mixer`."""

    def __init__(self, config: ModelConfig, index: int, own: MambaConfig, build: Build) -> None:
        super().__init__()
        self.index = index
        self.own = own
        self._name = config.layer_name(index, own.module)
        self._collective, self.eps = build.collective, config.norm_eps
        parts = parts_of(own, config, index, build.shard)
        self.inputs = Linear(parts.inputs, own.bias, build)
        self.output = Linear(parts.output, own.bias, build)
        self._held = _held(own, build.shard)
        self.groups = self._held.groups.size
        """Groups of this rank."""
        units = build.shard.even(own.units).size
        self.taps = parameter((units, own.channels, own.kernel), build.dtype, build.device)
        self.conv_bias = None
        if own.conv_bias:
            self.conv_bias = parameter((units, own.channels), build.dtype, build.device)
        shape = units, own.heads // own.units
        self.rate, self.rate_bias, self.skip = (
            parameter(shape, torch.float32, build.device) for _ in range(3)
        )
        """log of -A, what is added to time steps, and D."""
        self.gain = parameter((self._held.numbers.size,), build.dtype, build.device)
        """Weight of the norm behind the recurrence."""

    @property
    def has_whole_groups(self) -> bool:
        """Whether the numbers of its groups are all on this rank."""
        own = self.own
        return self._held.numbers.size == self.groups * (own.heads * own.head_dim // own.groups)

    @property
    def spec(self) -> AttentionSpec:
        """See `Mixer`."""
        scan = Scan(self.own, self.taps, self.conv_bias, self.skip)
        return AttentionSpec(1.0, recurrence=scan)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """See `Mixer`."""
        own, held = self.own, self._held
        inner, group = held.numbers.size, held.groups.size * own.state_dim
        sizes = [inner, inner, group, group, held.heads.size]
        gate, values, b, c, dt = torch.split(self.inputs(x), sizes, dim=1)
        units = len(self.rate)
        both = (self._of_units(each, units) for each in (b, c))
        inputs = torch.cat((torch.unflatten(values, 1, (units, -1)), *both), dim=-1)
        steps = F.softplus(torch.unflatten(dt, 1, (units, -1)).float() + self.rate_bias)
        steps = steps.clamp(own.least_step, own.most_step)
        out = step.attention(self.index, inputs, -self.rate.exp() * steps, steps)
        return self._collective.all_reduce(self.output(self.gated_norm(out.flatten(1), gate)))

    def gated_norm(self, out: Tensor, gate: Tensor) -> Tensor:
        """What the recurrence gives, behind its gates and the norm: [T, N] each."""
        return self._normed(out * F.silu(gate.float())).to(gate.dtype) * self.gain

    def _of_units(self, x: Tensor, units: int) -> Tensor:
        """[T, G * N] -> [T, U, N]: that of its group for each unit."""
        groups = torch.unflatten(x, 1, (-1, self.own.state_dim))
        return groups.repeat_interleave(units // groups.shape[1], dim=1)

    def _normed(self, x: Tensor) -> Tensor:
        """RMS norm over the numbers of each group, of which other ranks may have a part."""
        own, held = self.own, self._held
        of_group = own.heads * own.head_dim // own.groups
        groups = torch.unflatten(x, 1, (held.groups.size, -1))
        squares = groups.square().sum(-1)
        if groups.shape[-1] < of_group:
            every = squares.new_zeros(len(x), own.groups)
            every[:, held.groups.slice] = squares
            squares = self._collective.all_reduce(every)[:, held.groups.slice]
        return (groups * torch.rsqrt(squares / of_group + self.eps)[..., None]).flatten(1)

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """See `Mixer`."""
        own, held = self.own, self._held
        inner, dim = own.heads * own.head_dim, own.state_dim
        both = own.groups * dim
        rows = [held.numbers]
        for first in (inner, inner + both):
            groups = held.groups
            rows.append(Range(first + groups.start * dim, first + groups.end * dim))
        begin = 0
        for own_rows, width in zip(rows, (own.values, dim, dim), strict=True):
            yield self._conv_place("weight", self.taps[:, begin : begin + width], own_rows)
            if self.conv_bias is not None:
                yield self._conv_place("bias", self.conv_bias[:, begin : begin + width], own_rows)
            begin += width
        for name, tensor in (
            ("A_log", self.rate),
            ("dt_bias", self.rate_bias),
            ("D", self.skip),
        ):
            yield plain(f"{self._name}.{name}", tensor.view(-1), held.heads, own.heads)
        yield plain(f"{self._name}.norm.weight", self.gain, held.numbers, inner)
        yield from of_linear(self.inputs, form, shard)
        yield from of_linear(self.output, form, shard)

    def _conv_place(self, kind: str, target: Tensor, rows: Range) -> Place:
        """These rows of the convolution, which fill a part of all units. Units of a group have B
        and C of their group."""
        own, name = self.own, f"{self._name}.conv1d.{kind}"
        channels = own.heads * own.head_dim + 2 * own.groups * own.state_dim
        shape = (channels, 1, own.kernel) if kind == "weight" else (channels,)

        def fill(get: Get) -> None:
            parts = get(name, rows).view(-1, *target.shape[1:])
            target.copy_(parts.repeat_interleave(len(target) // len(parts), dim=0))

        return Place({name: TensorSpec(shape, FLOATS)}, fill)
