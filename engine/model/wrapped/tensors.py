"""Which tensors of a checkpoint fill a model of transformers.

Checkpoints may have other names than the class, or an expert's weights apart where the class has
one tensor. transformers' own tables of renamings and conversions say how they belong together; here
they are asked without reading a tensor, and used for one parameter after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.model.config import ModelError
from engine.model.places import FLOATS, Place
from engine.model.precision.base import Get, TensorSpec
from engine.model.sources import Header


class Origin(NamedTuple):
    """Tensors of a checkpoint that fill a parameter, or several."""

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    """Patterns of the conversion, by name."""
    conversion: Any
    """A converter of transformers; None: the only tensor is the parameter."""


class Origins(NamedTuple):
    """Where all parameters come from."""

    by_target: dict[str, Origin]
    """By name of the parameter, or of the first one of a conversion."""
    unknown: frozenset[str]
    """Tensors of the checkpoint that fill nothing."""


def own_names(model: nn.Module) -> Origins:
    """Origins in a checkpoint with the names of the class, as dummy weights have."""
    return Origins({name: Origin((name,), (), None) for name in model.state_dict()}, frozenset())


def origins_of(model: Any, headers: Mapping[str, Header]) -> Origins:
    """Asks transformers' tables.

    Args:
        model: of transformers, perhaps without numbers.
        headers: of the checkpoint's tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    every = get_model_conversion_mapping(model)
    converters = [each for each in every if isinstance(each, WeightConverter)]
    renamings = [each for each in every if not isinstance(each, WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    there, body = model.state_dict(), model.base_model_prefix
    found: dict[str, list[tuple[str, str]]] = {}
    unknown = set()
    for name in sorted(headers, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, body, there)
        if target not in there and name in there:
            target, pattern = name, None
        if target in there:
            found.setdefault(target, []).append((name, pattern or ""))
        else:
            unknown.add(name)
    by_target = {}
    for target, parts in found.items():
        names, patterns = zip(*parts, strict=True)
        conversion = of_pattern[patterns[0]] if patterns[0] else None
        by_target[target] = Origin(names, patterns, conversion)
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unknown = {name for name in unknown if not any(re.search(each, name) for each in ignored)}
    return Origins(by_target, frozenset(unknown))


def converted(model: Any, target: str, origin: Origin, get: Get) -> dict[str, Tensor]:
    """Reads tensors and converts them to parameters of the class, by their names."""
    tensors = [get(name) for name in origin.names]
    if origin.conversion is None:
        return {target: tensors[0]}
    conversion = deepcopy(origin.conversion)
    for name, pattern, tensor in zip(origin.names, origin.patterns, tensors, strict=True):
        conversion.add_tensor(target, name, pattern, tensor)
    try:
        found = conversion.convert(target, model=model, config=model.config)
    except Exception as error:  # Of any kind: it has not checked what it converts.
        raise ModelError(f"{target} cannot be made of {origin.names[0]} and its kin") from error
    return {name: each[0] if isinstance(each, list) else each for name, each in found.items()}


def targets_of(model: Any, target: str, origin: Origin, headers: Mapping[str, Header]) -> set[str]:
    """The parameters that tensors fill, found without reading them."""
    if origin.conversion is None:
        return {target}

    def shape(name: str, *_: Any) -> Tensor:
        header = headers[name]
        return torch.empty(header.shape, dtype=header.dtype, device="meta")

    return set(converted(model, target, origin, shape))


def place(
    model: Any, target: str, origin: Origin, headers: Mapping[str, Header], fill: Any
) -> Place:
    """The part of a model's weights that some tensors fill. `fill` takes them by name."""

    def read(get: Get) -> None:
        fill(converted(model, target, origin, get))

    specs = {name: TensorSpec(tuple(headers[name].shape), FLOATS) for name in origin.names}
    return Place(specs, read)


def tied(model: nn.Module) -> Iterator[set[str]]:
    """Names of parameters that are one."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    yield from names.values()
