"""The gated delta rule with fused kernels: decode rows are one kernel between the products."""

from __future__ import annotations

from torch import Tensor

from engine.attention.grouped import PagedGroups
from engine.cuda.mixers.folding import FusedFolding
from engine.cuda.products.one_row import cut_of, with_another
from engine.cuda.states.decode import decode_states
from engine.cuda.states.folding import fold
from engine.cuda.states.layout import Kept, Made, Places, Shape, Weights
from engine.cuda.states.mixing import mix
from engine.cuda.states.norms import norm_heads
from engine.cuda.states.rows import Rows
from engine.cuda.states.solving import solve
from engine.model.linear import RmsNorm
from engine.model.mixers.config import DeltaConfig
from engine.model.mixers.delta import DeltaRule
from engine.model.precision.dense import Dense
from engine.model.precision.fp8 import Fp8Blocks, Fp8Channels
from engine.model.precision.rounding import Rounded, Rounding, plain_of
from engine.pool.pools import KvPools


class FusedDelta(FusedFolding):
    """See `FusedMixer`."""

    def __init__(self, module: DeltaRule, pools: KvPools, attention: PagedGroups) -> None:
        super().__init__(module.output, module.index, pools, attention)
        self._module = module
        self._weights = Weights(module.taps, None, module.rate, module.rate_bias, None, (0.0, 0.0))
        self._shape = shape_of(module.own)
        self._places = places_of(module.own, len(module.rate))

    @property
    def reader(self) -> Rounding | None:
        """See `FusedMixer`. The product of gates reads rows in the model's dtype, too."""
        how = self._module.inputs.method.input
        return None if how is None else how._replace(keeps=True)

    def _folded(self, x: Tensor | Rounded) -> Tensor:
        """[T, U * R * Dv], with gates and norms."""
        module = self._module
        inputs, gates = self._products(x)
        made = self._places._replace(inputs=inputs, gates=gates)
        rows = self._rows.of(x)
        return folded(made, self._weights, self._kept, rows, self._shape, module.norm)

    def _products(self, x: Tensor | Rounded) -> tuple[Tensor, Tensor]:
        """Both of them; of one row in FP8 in one kernel."""
        module, inputs, gates = self._module, self._module.inputs, self._module.gates.method
        if isinstance(x, Rounded) and isinstance(gates, Dense) and inputs.bias is None:
            method, cut = inputs.method, cut_of(x.values)
            if isinstance(method, Fp8Channels | Fp8Blocks) and cut is not None:
                return with_another(method.values, method.scales, x, gates.weight, cut)
        return inputs(x), module.gates(plain_of(x))


def folded(
    made: Made, weights: Weights, kept: Kept, rows: Rows, shape: Shape, norm: RmsNorm
) -> Tensor:
    """Folds a step's tokens into states: [T, U * R * Dv], with gates and norms."""
    inputs, states = made.inputs, rows.states
    out = inputs.new_empty(len(inputs), weights.rate.numel() * shape.value_dim)
    given = weights, kept, states, shape
    if states.step.num_decodes:
        decode_states(made, *given, norm, out)
    if states.prompts:
        mixed = mix(made, *given, rows.chunks)
        fold(made, mixed, solve(mixed, shape, rows.chunks), *given, out)
        norm_heads(out, made, shape, norm, states.step.num_decodes, out)
    return out


def shape_of(own: DeltaConfig) -> Shape:
    """The shape of a layer."""
    heads = own.value_heads // own.key_heads
    channels = 0, own.key_dim, 2 * own.key_dim
    return Shape(True, heads, own.key_dim, own.value_dim, own.kernel, *channels)


def places_of(own: DeltaConfig, units: int) -> Made:
    """Where products have what a rank of so many units reads, but for the products."""
    key, value, heads = own.key_dim, own.values, own.value_heads // own.key_heads
    nothing = Tensor()
    if own.by_head:
        stride = own.channels + value
        q, k, v, gate = (Places(first, stride) for first in (0, key, 2 * key, own.channels))
        rate, beta = (Places(first, 2 * heads) for first in (heads, 0))
        return Made(nothing, q, k, v, gate, nothing, rate, beta)
    firsts = 0, key, 2 * key, 2 * key + value
    sizes = key, key, value, value
    q, k, v, gate = (Places(units * first, size) for first, size in zip(firsts, sizes, strict=True))
    rate, beta = (Places(first, heads) for first in (units * heads, 0))
    return Made(nothing, q, k, v, gate, nothing, rate, beta)
