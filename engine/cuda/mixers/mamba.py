"""Mamba-2 with fused kernels: decode rows are two between the products, the recurrence and the
norm."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.grouped import PagedGroups
from engine.cuda.mixers.folding import FusedFolding
from engine.cuda.states.decode import decode_states
from engine.cuda.states.folding import fold
from engine.cuda.states.layout import Kept, Made, Places, Shape, Weights
from engine.cuda.states.mixing import mix
from engine.cuda.states.norms import norm_groups
from engine.cuda.states.rows import Rows
from engine.model.mixers.config import MambaConfig
from engine.model.mixers.mamba import Mamba
from engine.model.precision.rounding import Rounded, Rounding
from engine.pool.pools import KvPools


class FusedMamba(FusedFolding):
    """See `FusedMixer`."""

    def __init__(self, module: Mamba, pools: KvPools, attention: PagedGroups) -> None:
        super().__init__(module.output, module.index, pools, attention)
        self._module, own = module, module.own
        self._weights = Weights(
            module.taps, module.conv_bias, module.rate, module.rate_bias, module.skip,
            (own.least_step, own.most_step),
        )  # fmt: skip
        self._shape = shape_of(own)
        self._places = places_of(own, len(module.rate), module.groups)

    @property
    def reader(self) -> Rounding | None:
        """See `FusedMixer`."""
        return self._module.inputs.method.input

    def _folded(self, x: Tensor | Rounded) -> Tensor:
        """[T, U * R * P], with gates and norms."""
        module = self._module
        inputs: Tensor = module.inputs(x)
        made = self._places._replace(inputs=inputs, gates=inputs)
        out = scanned(made, self._weights, self._kept, self._rows.of(x), self._shape)
        if module.has_whole_groups:
            norm = module.gain, module.groups, module.eps
            return norm_groups(out, inputs, made.gate, *norm)
        return module.gated_norm(out, inputs[:, : out.shape[1]])


def scanned(made: Made, weights: Weights, kept: Kept, rows: Rows, shape: Shape) -> Tensor:
    """Folds a step's tokens into states: [T, U * R * P] float32."""
    inputs, states = made.inputs, rows.states
    numbers = weights.rate.numel() * shape.value_dim
    out = inputs.new_empty(len(inputs), numbers, dtype=torch.float32)
    given = weights, kept, states, shape
    if states.step.num_decodes:
        decode_states(made, *given, None, out)
    if states.prompts:
        fold(made, mix(made, *given, rows.chunks), None, *given, out)
    return out


def shape_of(own: MambaConfig) -> Shape:
    """The shape of a layer. C is q, and B is k."""
    values, dim = own.values, own.state_dim
    channels = values + dim, values, 0
    heads = own.heads // own.units
    return Shape(False, heads, dim, own.head_dim, own.kernel, *channels)


def places_of(own: MambaConfig, units: int, groups: int) -> Made:
    """Where a rank's product has what its units read: the gate, x, B, C and the time steps."""
    inner, dim, heads = units * own.values, own.state_dim, own.heads // own.units
    behind, shared_by, nothing = 2 * inner, units // groups, Tensor()
    q, k = (Places(behind + part * groups * dim, dim, shared_by) for part in (1, 0))
    v, gate = Places(inner, own.values), Places(0, own.values)
    steps = Places(behind + 2 * groups * dim, heads)
    return Made(nothing, q, k, v, gate, nothing, steps, steps)
