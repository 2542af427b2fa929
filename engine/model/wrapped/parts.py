"""Norms and feed-forwards of a class that are ours under another name, so that ours stand in their
places.

What a module does is not read from its code: a small copy gets random weights and input, and its
answer is compared with ours. One that answers otherwise stays as it is.

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine.model.config import Activation, GatedConfig, ModelConfig
from engine.model.feed_forward import ACTIVATIONS, Gated
from engine.model.linear import Build, RmsNorm
from engine.model.places import Place
from engine.model.shard import Shard
from engine.model.wrapped.linears import set_module
from engine.model.wrapped.tensors import Origin

GATED: Final = ("gate_proj", "up_proj", "down_proj")
"""The three products of a gated feed-forward."""
_PROBE: Final = (8, 24)
"""Inputs and width of the copy of a feed-forward."""
_ALIKE: Final = 1e-5
"""How near the answers are in float32."""


class Replaced(nn.Module):
    """A gated feed-forward of ours in the place of a class's."""

    def __init__(self, gated: Gated) -> None:
        super().__init__()
        self.gated = gated
        self.run: Callable[[Gated, Tensor], Tensor] | None = None
        """What runs it on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        flat = x.reshape(-1, x.shape[-1])
        out: Tensor = self.gated(flat) if self.run is None else self.run(self.gated, flat)
        return out.view_as(x)

    def places(self, shard: Shard) -> Iterator[Place]:
        """The parts of its weights, in a fixed order."""
        yield from self.gated.places(None, shard)


def replace(
    causal: nn.Module,
    config: ModelConfig,
    origins: Mapping[str, Origin],
    build: Build,
) -> Counter[str]:
    """Puts ours into the body of a model, with memory that is not filled.

    Args:
        causal: of transformers.
        config: what the dry run has found.
        origins: of its parameters; what a checkpoint has under other names stays as it is.
        build: what ours are built with.

    Returns:
        How many of each class were replaced.
    """
    found: Counter[str] = Counter()
    known: dict[Any, Any] = {}
    for name, module in list(causal.get_submodule(config.body).named_modules()):
        full = f"{config.body}.{name}"
        ours = _norm(module, known, build) or _gated(full, module, known, config, origins, build)
        if ours is not None:
            set_module(causal, full, ours)
            found[type(module).__name__] += 1
    return found


# -- norms --------------------------------------------------------------------------------------


def _norm(module: nn.Module, known: dict[Any, Any], build: Build) -> RmsNorm | None:
    weight, eps = getattr(module, "weight", None), _eps(module)
    own = [name for name, _ in module.named_parameters()]
    if eps is None or own != ["weight"] or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    key = type(module), eps
    if key not in known:
        known[key] = _like_ours(module, eps)
    if known[key] is None or isinstance(module, RmsNorm):
        return None
    return RmsNorm(len(weight), eps, build, plus_one=known[key])


def _eps(module: nn.Module) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def _like_ours(module: nn.Module, eps: float) -> bool | None:
    """Whether a norm multiplies by 1 + its weight; None: it does something else."""
    probe = copy.deepcopy(module).to_empty(device="cpu").float()
    draw = torch.Generator().manual_seed(0)
    size = len(probe.weight)  # type: ignore[arg-type]
    weight, x = torch.randn(size, generator=draw), torch.randn(3, size, generator=draw)
    with torch.no_grad():
        probe.weight.copy_(weight)  # type: ignore[operator]
        try:
            found = probe(x)
        except Exception:  # Of any kind: it wants something else than a norm of ours.
            return None
    for plus in (False, True):
        want = nn.functional.rms_norm(x, (size,), weight + plus, eps)
        if isinstance(found, Tensor) and torch.allclose(found, want, _ALIKE, _ALIKE):
            return plus
    return None


# -- feed-forwards ------------------------------------------------------------------------------


def _gated(
    full: str,
    module: nn.Module,
    known: dict[Any, Any],
    config: ModelConfig,
    origins: Mapping[str, Origin],
    build: Build,
) -> Replaced | None:
    place = re.fullmatch(rf"{re.escape(config.body)}\.layers\.(\d+)\.(.+)", full)
    if place is None or not _has_three(module):
        return None
    names = {name for name, _ in module.named_parameters()}
    targets = [f"{full}.{name}" for name in names]
    if any(each not in origins or origins[each].names != (each,) for each in targets):
        return None
    key = type(module), str(getattr(module, "act_fn", ""))
    if key not in known:
        known[key] = _activation(module)
    if (activation := known[key]) is None:
        return None
    gate: Any = module.gate_proj
    bias, rest = gate.bias is not None, place[2]
    own = GatedConfig(
        gate.out_features, activation, bias,
        (f"{rest}.gate_proj", f"{rest}.up_proj"), f"{rest}.down_proj",
    )  # fmt: skip
    return Replaced(Gated(config, int(place[1]), own, build))


def _has_three(module: nn.Module) -> bool:
    """Whether it has the three products, all with a bias or none, and no other weight."""
    products: list[Any] = [getattr(module, name, None) for name in GATED]
    if not all(type(each) is nn.Linear for each in products):
        return False
    own = {f"{name}.{kind}" for name in GATED for kind in ("weight", "bias")}
    found = {name for name, _ in module.named_parameters()}
    whole = {name for name in own if name.endswith("weight")}
    return found in (own, whole) and not list(module.named_buffers())


def _activation(module: nn.Module) -> Activation | None:
    """What a copy of it does with its gate; None: it is no such feed-forward."""
    probe, (inputs, width) = copy.copy(module), _PROBE
    draw = torch.Generator().manual_seed(0)
    sizes = ((inputs, width), (inputs, width), (width, inputs))
    probe._modules = dict(module._modules)
    for name, (less, more) in zip(GATED, sizes, strict=True):
        probe._modules[name] = product = nn.Linear(less, more, bias=False)
        product.weight.data = torch.randn(more, less, generator=draw)
    gate, up, down = (probe._modules[name] for name in GATED)
    assert gate is not None
    assert up is not None
    assert down is not None
    x = torch.randn(3, inputs, generator=draw)
    with torch.no_grad():
        try:
            found = probe(x)
        except Exception:  # Of any kind: it wants something else than a row of numbers.
            return None
        for activation, function in ACTIVATIONS.items():
            want = down(function(gate(x)) * up(x))
            if isinstance(found, Tensor) and torch.allclose(found, want, _ALIKE, _ALIKE):
                return activation
    return None
