"""Our products in the places of transformers' `nn.Linear`.

So weights are packed and rounded and divided among ranks as those of every other
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from torch import Tensor, nn

from engine.model.linear import Build, Linear
from engine.model.precision.base import WeightSlice
from engine.model.region import Region
from engine.model.wrapped.ranks import INPUTS, OUTPUTS, style_of
from engine.step.collective import Collective

ROUTERS: Final = ("gate", "router", "shared_expert_gate")
"""Last names of modules that choose experts. They stay as they are, as in other models."""


class Product(nn.Module):
    """A product with the attributes that code of transformers may read."""

    def __init__(self, linear: Linear, adds: Collective | None) -> None:
        """`adds`: the ranks that add up their outputs; None: each has its own."""
        super().__init__()
        self.linear = linear
        self._adds = adds
        region = linear.parts[0].region
        self.in_features, self.out_features = region.columns.size, region.rows.size

    @property
    def weight(self) -> Tensor:
        """Its weight, where that is a plain one."""
        found = self.linear.method.weight
        assert isinstance(found, Tensor)
        return found

    @property
    def bias(self) -> Tensor | None:
        """[outputs], if it has one."""
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        out: Tensor = self.linear(x.reshape(-1, x.shape[-1]))
        if self._adds is not None:
            out = self._adds.all_reduce(out)
        return out.view(*x.shape[:-1], -1)


def products(body: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Linear]]:
    """The modules of a body that become ours, with their full names."""
    for name, module in body.named_modules():
        if type(module) is nn.Linear and name.rpartition(".")[2] not in ROUTERS:
            yield f"{prefix}.{name}", module


def replace(
    model: nn.Module, prefix: str, modules: Mapping[str, str], plan: dict[str, str], build: Build
) -> None:
    """Puts our products into the body of a model, with memory that is not filled.

    Args:
        model: of transformers.
        prefix: name of its body.
        modules: by names of its modules, those of the checkpoint, where they differ.
        plan: how ranks share it (`engine.model.wrapped.ranks`).
        build: what they are built with.
    """
    for name, module in list(products(model.get_submodule(prefix), prefix)):
        shape, style = (module.out_features, module.in_features), style_of(plan, name)
        region = Region.whole(*shape)
        if style == OUTPUTS:
            region = Region.some_rows(shape, build.shard.even(shape[0]))
        elif style == INPUTS:
            region = Region.some_columns(shape, build.shard.even(shape[1]))
        part = WeightSlice(modules.get(name, name), region)
        linear = Linear([part], module.bias is not None, build)
        adds = build.collective if style == INPUTS else None
        set_module(model, name, Product(linear, adds))


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts a module into the place of another one."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
