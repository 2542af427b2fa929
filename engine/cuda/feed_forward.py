"""What stands behind the mixer in a layer, with fused kernels, over the modules of
`engine.model.feed_forward` and `engine.model.decoder`.

Another kind has its own case in `reader_of` and `run`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.cuda import kernels
from engine.cuda.adapters.additions import CudaAddition
from engine.cuda.experts.beside import SharedWeights, beside_of
from engine.cuda.experts.mixing import parts_of
from engine.cuda.experts.routing import route
from engine.cuda.experts.summing import Parts, Shared, add_up
from engine.cuda.groups.dispatch import CudaDispatch
from engine.cuda.products.joins import join
from engine.cuda.products.rounding import rounded, silu_mul_rounded
from engine.model.config import Activation
from engine.model.decoder import Input
from engine.model.experts.beside import Beside
from engine.model.experts.layer import Experts
from engine.model.experts.routing import Chosen, held
from engine.model.experts.stacked import Stacked
from engine.model.feed_forward import Gated, Mlp
from engine.model.linear import Linear, RmsNorm
from engine.model.precision.dense import Dense
from engine.model.precision.rounding import Rounded, Rounding, is_alike, plain_of
from engine.step.dispatch import STAY


def reader_of(module: Gated | Mlp | Experts | Beside) -> Rounding | None:
    """How it takes its input in the step that runs; None: in the model's dtype."""
    if isinstance(module, Mlp):
        return module.up.reads
    if isinstance(module, Experts):  # The router reads them in the model's dtype.
        how = module.gate_up.input
        if how is None or module.dispatch is not STAY:  # Rows of all workers are rounded together.
            return None
        return how._replace(keeps=True)
    return module.gate_up.reads if isinstance(module, Gated) else None


def run(module: Gated | Mlp | Experts | Beside, x: Tensor | Rounded) -> Tensor | Parts:
    """[T, H] in the form of `reader_of` -> [T, H], of experts perhaps not added up."""
    if isinstance(module, Gated):
        return _gated(module, x)
    if isinstance(module, Mlp):
        out: Tensor = module.down(kernels.relu_squared(module.up(x)))
        return out
    if isinstance(module, Experts):
        return _experts(module, x)
    assert isinstance(x, Tensor)
    return _beside(module, x)


def layer_input(module: Input, x: Tensor | Rounded, own: Tensor) -> Tensor:
    """What a layer makes of its inputs [T, P], opened by [T, H], before the norm -> [T, H]."""
    gate = module.gate(x)
    if module.activation is Activation.SILU:
        middle = kernels.silu_mul(torch.cat((gate, own), dim=1))
    else:
        middle = kernels.gelu_mul(gate, own, by_tanh=module.activation is Activation.GELU_TANH)
    out: Tensor = module.product(middle)
    return out


def _gated(module: Gated, x: Tensor | Rounded) -> Tensor:
    reader = module.down.reads
    if module.activation is Activation.SILU:
        middle = gated(x, module.gate_up, reader)
    else:
        by_tanh = module.activation is Activation.GELU_TANH
        middle = kernels.gelu_mul(*module.gate_up(x).chunk(2, dim=1), by_tanh=by_tanh)
    out: Tensor = module.down(middle)
    return out


def _beside(module: Beside, x: Tensor) -> Tensor:
    """Its norms are over whole sums, so ranks add up each part before."""
    before, after, before_experts, after_experts = map(_norm_of, module.norms)
    gated, collective = module.gated, module.experts.collective
    assert isinstance(gated, Gated)
    routed = _normed(x, module.router_norm)
    chosen = route(module.experts.router(routed), module.experts.own.routing, None)
    scales = module.expert_scale.float().index_select(0, chosen.experts.flatten())
    chosen = chosen._replace(weights=chosen.weights * scales.view_as(chosen.weights))
    plain = _gated(gated, as_read(_normed(x, before), reader_of(gated)))
    out = _normed(collective.all_reduce(plain), after)
    own, read = module.experts, _normed(x, before_experts)
    if isinstance(own.dispatch, CudaDispatch):
        every, here = own.dispatch.gather(read, chosen, len(own.gate_up.parts))
        mixed = own.dispatch.scatter(_parts_of(own, every, here), len(x))
    else:
        chosen = held(chosen, len(own.gate_up.parts), own.held)
        mixed = collective.all_reduce(add_up(_parts_of(own, read, chosen)))
    return join(out, mixed, after_experts.weight, None, after_experts.eps, 1.0)


def _norm_of(module: nn.Module) -> RmsNorm:
    assert isinstance(module, RmsNorm)
    return module


def _normed(x: Tensor, norm: RmsNorm) -> Tensor:
    return kernels.rms_norm(x, norm.weight, norm.eps)


def _parts_of(
    module: Experts, x: Tensor | Rounded, chosen: Chosen, beside: SharedWeights | None = None
) -> Parts:
    assert isinstance(module.gate_up, Stacked)
    assert isinstance(module.down, Stacked)
    ranks, total = module.held.ranks, None if module.pairs is None else module.pairs.total
    return parts_of(x, chosen, module.gate_up, module.down, module.own.gate, beside, ranks, total)


def _moved(module: Experts, x: Tensor, moves: CudaDispatch) -> Tensor:
    """Experts of which other workers of the group hold some: [T, H] -> [T, H], whole sums."""
    chosen = route(module.router(x), module.own.routing, module.choice_bias)
    parts = _parts_of(module, *moves.gather(x, chosen, len(module.gate_up.parts)))
    if isinstance(shared := module.shared, Gated):
        out = _gated(shared, as_read(x, reader_of(shared)))
        parts = parts._replace(shared=Shared(out, x, _gate_of(module)))
    return moves.scatter(parts, len(x))


def _experts(module: Experts, x: Tensor | Rounded) -> Parts | Tensor:
    plain, shared = plain_of(x), module.shared
    if isinstance(module.dispatch, CudaDispatch):
        return _moved(module, plain, module.dispatch)
    chosen = route(module.router(plain), module.own.routing, module.choice_bias, module.held)
    if not isinstance(shared, Gated):
        return _parts_of(module, x, chosen)
    beside = beside_of(module) if plain.shape[0] == 1 and not shared.gate_up.adds else None
    parts = _parts_of(module, x, chosen, beside)
    if beside is None:
        reader = reader_of(shared)
        taken = x if is_alike(reader, module.gate_up.input) else as_read(plain, reader)
        out = _gated(shared, taken)
    else:
        out = parts.parts[-1:]
    return parts._replace(shared=Shared(out, plain, _gate_of(module)))


def _gate_of(module: Experts) -> Tensor | None:
    """The gate of the shared expert, [1, H]."""
    gate = None if module.shared_gate is None else module.shared_gate.method
    assert gate is None or isinstance(gate, Dense), "it is kept in the model's dtype"
    return None if gate is None else gate.weight


def gated(x: Tensor | Rounded, gate_up: Linear, reader: Rounding | None) -> Tensor | Rounded:
    """silu(gate) * up of [T, H] -> [T, I], perhaps rounded as its reader wants."""
    if gate_up.adds:
        assert isinstance(gate_up.addition, CudaAddition)
        return as_read(gate_up.addition.gated(x, gate_up), reader)
    fused = gate_up.method.gated(x) if gate_up.bias is None else None
    if fused is not None:
        return fused
    both = gate_up(x)
    return kernels.silu_mul(both) if reader is None else silu_mul_rounded(both, reader)


def as_read(x: Tensor, reader: Rounding | None) -> Tensor | Rounded:
    """In the form that a product takes."""
    return x if reader is None else rounded(x, reader)
