"""How one module's tensors are written: a *layout*. A format says which module has which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Protocol

import torch

from engine.model.precision.base import BLOCK, Get, Kind, Quantised, Scheme, TensorSpec
from engine.model.precision.formats.packing import FLOATS, positive
from engine.model.region import Region

CACHE_SCALES = (
    "k_scale",
    "v_scale",
    "kv_scale",
    "q_scale",
    "prob_scale",
    "output_scale",
    "prob_output_scale",
    "k_zero_point",
    "v_zero_point",
)
"""Last parts of the names of scales of the KV cache and of attention."""


class Layout(Protocol):
    """How the tensors of a module are written. See `Format` for its functions."""

    @property
    def scheme(self) -> Scheme:
        """The scheme of the module."""
        ...

    def specs(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """Its tensors by full name."""
        ...

    def read(self, module: str, region: Region, get: Get) -> Quantised:
        """A part of its weight."""
        ...


class LayoutFormat:
    """A format that gives each module a layout. See `Format`."""

    def __init__(
        self,
        name: str,
        layout: Callable[[str], Layout | None],
        zeros: tuple[str, ...] = (),
    ) -> None:
        """A format.

        Args:
            name: its name for people.
            layout: the layout of a module; None: its weight is a float tensor. It is asked once
                for each: a model with experts has 20,000 modules, and a description hundreds of
                patterns.
            zeros: ends of the names of tensors of quantised modules that no product needs, beside
                scales of the cache. They must be zero.
        """
        self.name = name
        self._layout = cache(layout)
        self._zeros = zeros

    def scheme(self, module: str) -> Scheme | None:
        """See `Format`."""
        layout = self._layout(module)
        return layout.scheme if layout else None

    def specs(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """See `Format`."""
        return self._quantised(module).specs(module, shape)

    def read(self, module: str, region: Region, get: Get) -> Quantised:
        """See `Format`."""
        return self._quantised(module).read(module, region, get)

    def is_unused(self, name: str) -> bool:
        """See `Format`."""
        return name.rpartition(".")[2] in CACHE_SCALES or self.is_zero(name)

    def is_zero(self, name: str) -> bool:
        """See `Format`."""
        module = name.rpartition(".")[0]
        return name.endswith(self._zeros) and self._layout(module) is not None

    def _quantised(self, module: str) -> Layout:
        layout = self._layout(module)
        if layout is None:
            raise ValueError(f"{module} is not quantised")
        return layout


class Scales(Enum):
    """What shares a scale in an FP8 weight."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    TENSOR_OR_CHANNEL = "tensor or channel"
    """The description does not say; the tensor's shape does."""
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """`weight` in e4m3 beside its scales: a value times its scale is the weight."""

    scales: Scales
    static_input: bool = False
    """There is an `input_scale`."""
    float_input: bool = False
    scale_name: str = "weight_scale"

    @property
    def scheme(self) -> Scheme:
        """See `Layout`."""
        kind = Kind.FP8_BLOCKS if self.scales is Scales.BLOCK else Kind.FP8_CHANNELS
        return Scheme(kind, static_input=self.static_input, float_input=self.float_input)

    def specs(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """See `Layout`."""
        specs = {
            f"{module}.weight": TensorSpec(shape, (torch.float8_e4m3fn,)),
            f"{module}.{self.scale_name}": self._scale_spec(shape),
        }
        if self.static_input:
            specs[f"{module}.input_scale"] = TensorSpec((1,), FLOATS)
        return specs

    def read(self, module: str, region: Region, get: Get) -> Quantised:
        """See `Layout`. One scale becomes the scale of each channel, which changes no value."""
        name = f"{module}.{self.scale_name}"
        scales = positive(get(name), name)
        if self.scales is Scales.BLOCK:
            scales = region.of(scales.reshape(_blocks(region.shape)), BLOCK, BLOCK)
        else:
            outputs, inputs = region.shape
            scales = region.of(scales.reshape(-1, 1).expand(outputs, 1), 1, inputs).contiguous()
        input_scale = None
        if self.static_input:
            name = f"{module}.input_scale"
            input_scale = positive(get(name), name).reshape(())
        values = get(f"{module}.weight", region.rows, region.columns)
        return Quantised(values, scales, input_scale=input_scale)

    def _scale_spec(self, shape: tuple[int, int]) -> TensorSpec:
        match self.scales:
            case Scales.TENSOR:
                return TensorSpec((1,), FLOATS)
            case Scales.CHANNEL:
                return TensorSpec((shape[0], 1), FLOATS)
            case Scales.TENSOR_OR_CHANNEL:
                return TensorSpec((1,), FLOATS, (shape[0], 1))
            case Scales.BLOCK:
                return TensorSpec(_blocks(shape), FLOATS)


def _blocks(shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)
