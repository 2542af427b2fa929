"""Checkpoints of llm-compressor, in the layouts of the library compressed-tensors.

Each group of the description has *targets*: names of modules, regular expressions after `re:`, or
the class `Linear`. A name goes before an expression, and an expression before the class. Modules
under `ignore` stay float.

- `float-quantized` (and `naive-quantized`, which it is called without rounded inputs): e4m3.
- `pack-quantized`: values of four bits, eight in an int32 along K, the lowest bits first, zero
  points the same along N. Both are stored plus 8, which makes them 0 to 15.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.config import ModelError
from engine.model.precision.base import BLOCK, Get, Kind, Quantised, Scheme, TensorSpec
from engine.model.precision.formats.expressions import Expressions
from engine.model.precision.formats.layout import Fp8Layout, Layout, LayoutFormat, Scales
from engine.model.precision.formats.names import EMBEDDING, is_target
from engine.model.precision.formats.packing import (
    A_WORD,
    FLOATS,
    groups,
    inside,
    positive,
    unpacked,
)
from engine.model.precision.formats.settings import Settings
from engine.model.region import Region

FLOAT_FORMATS = ("float-quantized", "naive-quantized")
PACKED_FORMAT = "pack-quantized"
A_CLASS = "Linear"


def read_compressed_tensors(settings: Settings) -> LayoutFormat:
    """The format of a description.

    Raises:
        UnsupportedModelError: something in it is not supported.
    """
    settings = _flat(settings)
    settings.inner("sparsity_config").one_of("format", ("dense", None))
    settings.absent("transform_config", works="checkpoints without transforms are")
    targets = _targets(settings)
    ordered = sorted(targets, key=lambda target: ("re:" in target, target))
    ignored = settings.names("ignore")
    expressions = Expressions()

    def is_one(module: str, target: str) -> bool:
        return is_target(module, target, expressions)

    def layout(module: str) -> Layout | None:
        is_linear = module != EMBEDDING
        if any(is_one(module, each) or (is_linear and each == A_CLASS) for each in ignored):
            return None
        for target in ordered:
            if is_one(module, target):
                return targets[target]
        return targets.get(A_CLASS) if is_linear else None

    quantised = (group for group in _groups(settings) if group.get("weights") is not None)
    formats = sorted({_format(group, settings) for group in quantised})
    return LayoutFormat(" ".join(("compressed-tensors", *formats)), layout)


def _flat(settings: Settings) -> Settings:
    """transformers has also written the description one level deeper."""
    inner = settings.inner("quantization_config")
    return Settings(inner.where, {**settings.values, **inner.values}) if inner.values else settings


def _groups(settings: Settings) -> list[Settings]:
    config = settings.inner("config_groups")
    return [config.inner(name) for name in config.values]


def _targets(settings: Settings) -> dict[str, Layout | None]:
    """The layout of each target; of equal targets the last one counts, as in the library."""
    return {
        target: layout
        for group in _groups(settings)
        for layout in [_layout(group, settings)]
        for target in group.names("targets")
    }


def _format(group: Settings, settings: Settings) -> str:
    """The format of a group. Its own goes before that of the checkpoint (`mixed-precision`)."""
    owner = group if group.get("format") else settings
    return str(owner.one_of("format", (*FLOAT_FORMATS, PACKED_FORMAT)))


def _layout(group: Settings, settings: Settings) -> Layout | None:
    if group.get("weights") is None:
        return None
    group.absent("output_activations", works="outputs that are not rounded are")
    weights = group.inner("weights")
    weights.one_of("dynamic", (False,), False)
    if _format(group, settings) == PACKED_FORMAT:
        return _packed(group, weights)
    return _float(group, weights)


# -- FP8 ----------------------------------------------------------------------------------------


def _float(group: Settings, weights: Settings) -> Layout:
    _check_e4m3(weights)
    scales = Scales(weights.one_of("strategy", ("tensor", "channel", "block"), "tensor"))
    if scales is Scales.BLOCK and weights.get("block_structure") not in ([BLOCK, BLOCK], "128x128"):
        raise weights.refusal("block_structure", f"supported: [{BLOCK}, {BLOCK}]")
    if group.get("input_activations") is None:
        return Fp8Layout(scales, float_input=True)
    inputs = group.inner("input_activations")
    return Fp8Layout(scales, static_input=_is_static(inputs, scales))


def _is_static(inputs: Settings, scales: Scales) -> bool:
    """Whether the checkpoint has the scale of the input.

    A dynamic scale of a whole tensor is refused: with it a token would depend on its neighbours.
    """
    _check_e4m3(inputs)
    if scales is Scales.BLOCK:
        inputs.one_of("dynamic", (True,), False)
        inputs.one_of("strategy", ("group",))
        inputs.one_of("group_size", (BLOCK,))
        return False
    dynamic = inputs.one_of("dynamic", (True, False), False)
    inputs.one_of("strategy", ("token",) if dynamic else ("tensor",), "tensor")
    return not dynamic


def _check_e4m3(arguments: Settings) -> None:
    arguments.one_of("num_bits", (8,), 8)
    arguments.one_of("type", ("float",), "int")
    arguments.one_of("symmetric", (True,), True)


# -- INT4 ---------------------------------------------------------------------------------------


def _packed(group: Settings, weights: Settings) -> Layout:
    weights.one_of("num_bits", (4,), 8)
    weights.one_of("type", ("int",), "int")
    weights.one_of("actorder", (None, False, "weight", "static"))
    group.absent("input_activations", works="inputs that are not rounded are")
    strategy = weights.one_of("strategy", ("group", "channel"), _strategy(weights))
    size = weights.group("group_size") if strategy == "group" else 0
    return PackedLayout(size, weights.one_of("symmetric", (True, False), True))


def _strategy(weights: Settings) -> str:
    """What the library infers where the description does not say."""
    size = weights.get("group_size")
    return "tensor" if size is None else "channel" if size == -1 else "group"


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """`weight_packed` [N, K / 8], `weight_scale` [N, K / group], `weight_zero_point`
    [N / 8, K / group] if not symmetric, and `weight_shape`."""

    group: int
    """0: all inputs of a channel."""
    symmetric: bool

    @property
    def scheme(self) -> Scheme:
        """See `Layout`."""
        return Scheme(Kind.INT4, group=self.group)

    def specs(self, module: str, shape: tuple[int, int]) -> dict[str, TensorSpec]:
        """See `Layout`."""
        outputs, inputs = shape
        count = groups(module, inputs, self.group)
        words = TensorSpec((outputs, -(-inputs // A_WORD)), (torch.int32,))
        specs = {
            f"{module}.weight_packed": words,
            f"{module}.weight_scale": TensorSpec((outputs, count), FLOATS),
            f"{module}.weight_shape": TensorSpec((2,), (torch.int64, torch.int32)),
        }
        if not self.symmetric:
            words = TensorSpec((-(-outputs // A_WORD), count), (torch.int32,))
            specs[f"{module}.weight_zero_point"] = words
        return specs

    def read(self, module: str, region: Region, get: Get) -> Quantised:
        """See `Layout`."""
        (outputs, inputs), columns = region.shape, region.columns
        stated = get(f"{module}.weight_shape").tolist()
        if stated != [outputs, inputs]:
            raise ModelError(
                f"{module}.weight_shape is {stated}, the config says {list(region.shape)}"
            )
        name = f"{module}.weight_scale"
        scales = positive(get(name), name).reshape(outputs, -1)
        zeros: Tensor | None = None
        if not self.symmetric:
            words = get(f"{module}.weight_zero_point").reshape(-1, scales.shape[1])
            zeros = unpacked(words.T)[:, :outputs].T
            zeros = region.of(zeros, 1, self.group or inputs).contiguous()
        words = get(f"{module}.weight_packed", region.rows, columns.over(A_WORD))
        values = unpacked(words)[:, inside(columns)].contiguous()
        return Quantised(values, region.of(scales, 1, self.group or inputs), zeros)
