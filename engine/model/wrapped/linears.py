"""Our products in the places of transformers' `nn.Linear`.

So weights are packed and rounded as those of every other model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from torch import Tensor, nn

from engine.model.linear import Build, Linear
from engine.model.precision.base import WeightSlice
from engine.model.region import Region

ROUTERS: Final = ("gate", "router", "shared_expert_gate")
"""Last names of modules that choose experts. They stay as they are, as in other models."""


class Product(nn.Module):
    """A product with the attributes that code of transformers may read."""

    def __init__(self, linear: Linear, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = inputs, outputs

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
        return out.view(*x.shape[:-1], -1)


def products(body: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Linear | Product]]:
    """The modules of a body that become ours, or are, with their full names."""
    for name, module in body.named_modules():
        ours = type(module) is nn.Linear and name.rpartition(".")[2] not in ROUTERS
        if ours or isinstance(module, Product):
            yield f"{prefix}.{name}", module


def replace(model: nn.Module, prefix: str, modules: Mapping[str, str], build: Build) -> None:
    """Puts our products into the body of a model, with memory that is not filled. They may replace
    such products, too.

    Args:
        model: of transformers.
        prefix: name of its body.
        modules: by names of its modules, those of the checkpoint, where they differ.
        build: what they are built with.
    """
    for name, module in list(products(model.get_submodule(prefix), prefix)):
        inputs, outputs = module.in_features, module.out_features
        part = WeightSlice(modules.get(name, name), Region.whole(outputs, inputs))
        linear = Linear([part], module.bias is not None, build)
        set_module(model, name, Product(linear, inputs, outputs))


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts a module into the place of another one."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
