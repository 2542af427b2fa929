"""Places: the parts of a model's weights, and the tensors of a checkpoint that fill each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.checkpoints import Weights
from engine.model.config import ModelConfig, ModelError, UnsupportedModelError
from engine.model.linear import Linear, RmsNorm
from engine.model.precision.base import Format, Get, TensorSpec, WeightSlice
from engine.model.precision.dense import dequantised
from engine.model.region import Range
from engine.model.shard import Shard
from engine.model.sources import Source
from engine.step.collective import Collective
from engine.step.dispatch import Dispatch
from engine.step.stages import Stages

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of tensors that are not quantised."""


Check = Callable[[Weights], None]
"""Takes the number of weights before they are read, and may refuse them."""
Progress = Callable[[str, int, int], None]
Accepts = Callable[[ModelConfig], None]
"""Takes the model's config before weights are read, and may refuse it."""


class Load(NamedTuple):
    """How a model is loaded. See `engine.model.loading.load_model`."""

    dtype: torch.dtype
    device: torch.device
    dummy: bool
    """Weights are drawn from the seed."""
    seed: int
    quantization: str
    accepts: Accepts | None
    check: Check | None
    progress: Progress | None
    shard: Shard
    collective: Collective | None
    stages: Stages | None
    stage_layers: tuple[int, ...]
    dispatch: Dispatch


class Place(NamedTuple):
    """A part of the model's weights."""

    specs: dict[str, TensorSpec]
    """The tensors of the checkpoint that fill it."""
    fill: Callable[[Get], None]


def plain(name: str, target: Tensor, rows: Range | None = None, whole: int = 0) -> Place:
    """A tensor that is copied as it is, or these rows of a tensor of `whole` ones."""
    size = whole or len(target)
    spec = TensorSpec((size, *target.shape[1:]), FLOATS)
    return Place({name: spec}, partial(_fill_plain, target, name, rows or Range(0, size)))


def _fill_plain(target: Tensor, name: str, rows: Range, get: Get) -> None:
    target.copy_(get(name, rows))


def of_norm(module: str, norm: RmsNorm, rows: Range | None = None, whole: int = 0) -> Place:
    """The gain of a norm, or a rank's part of it."""
    place = plain(f"{module}.weight", norm.weight, rows, whole)
    return place._replace(fill=partial(_fill_gain, norm, place)) if norm.plus else place


def _fill_gain(norm: RmsNorm, place: Place, get: Get) -> None:
    place.fill(get)
    norm.weight.add_(norm.plus)


def of_linear(linear: Linear, form: Format | None, shard: Shard) -> Iterator[Place]:
    """Weight and bias of a product. `form`: the format of quantised weights."""
    first = 0
    for part in linear.parts:
        module, region = part.module, part.region
        if form is None or form.scheme(module) is None:
            specs = {f"{module}.weight": TensorSpec(region.shape, FLOATS)}
            yield Place(specs, partial(_fill_float, linear, first, part))
        else:
            specs = form.specs(module, region.shape)
            yield Place(specs, partial(_fill_quantised, linear, first, form, part))
        if linear.bias is not None:
            target = linear.bias[first : first + part.rows]
            bias = plain(f"{module}.bias", target, region.rows, whole=region.shape[0])
            adds = shard.rank == 0 or region.columns.size == region.shape[1]
            yield bias if adds else bias._replace(fill=partial(_fill_zeros, target, bias))
        first += part.rows


def widened(part: WeightSlice, target: Tensor, form: Format | None) -> Place:
    """A part of a weight [N, K] that is kept in the model's dtype, however the checkpoint has
    it."""
    module, region = part.module, part.region
    if form is None or form.scheme(module) is None:
        specs = {f"{module}.weight": TensorSpec(region.shape, FLOATS)}
    else:
        specs = form.specs(module, region.shape)
    return Place(specs, partial(_fill_widened, part, target, form))


def _fill_widened(part: WeightSlice, target: Tensor, form: Format | None, get: Get) -> None:
    module, region = part.module, part.region
    if form is None or form.scheme(module) is None:
        target.copy_(get(f"{module}.weight", region.rows, region.columns))
    else:
        target.copy_(dequantised(form.read(module, region, get)))


def _fill_float(linear: Linear, first: int, part: WeightSlice, get: Get) -> None:
    name, region = f"{part.module}.weight", part.region
    linear.method.fill(first, get(name, region.rows, region.columns))


def _fill_quantised(linear: Linear, first: int, form: Format, part: WeightSlice, get: Get) -> None:
    linear.method.fill(first, form.read(part.module, part.region, get))


def _fill_zeros(target: Tensor, place: Place, get: Get) -> None:
    """Reads for the revision alone: of a sum over all ranks, rank 0 adds the bias."""
    place.fill(get)
    target.zero_()


# -- filling ------------------------------------------------------------------------------------


def check_tensors(wanted: Mapping[str, TensorSpec], source: Source) -> None:
    """Compares shapes and dtypes of a checkpoint's tensors, by name, with those that are wanted.

    Raises:
        ModelError: a tensor has another shape.
        UnsupportedModelError: a tensor has another dtype.
    """
    for name, spec in wanted.items():
        header = source.headers[name]
        if not spec.fits(header.shape):
            raise ModelError(
                f"{name} has shape {list(header.shape)}, the config says {list(spec.shape)}"
            )
        if header.dtype not in spec.dtypes:
            raise UnsupportedModelError(
                f"{name} is {header.dtype}; this model has"
                f" {' or '.join(map(str, spec.dtypes))} there"
            )


def fill(
    places: Sequence[Place],
    source: Source,
    stated: Mapping[str, object],
    progress: Progress | None,
    whole: Sequence[Place] = (),
) -> str:
    """Reads all tensors, one at a time.

    Args:
        places: of a model, or of a stage of it.
        source: the checkpoint.
        stated: what else makes the model what it is.
        progress: called with ("weights", places done, places in all).
        whole: the places of all stages, if there are several: the revision is that of the model.

    Returns:
        The revision: a digest of what is stated, and of the first and last row of each tensor.
    """
    ends: dict[str, Tensor] = {}

    def get(name: str, *where: Range) -> Tensor:
        tensor, own = _read(source, name, where)
        ends.setdefault(name, own.cpu())  # One may be cut into several parts, as some ranks do.
        return tensor

    for done, place in enumerate(places, 1):
        place.fill(get)
        if progress:
            progress("weights", done, len(places))
    text = json.dumps(stated, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode())
    for name in dict.fromkeys(name for place in whole or places for name in place.specs):
        own = ends[name] if name in ends else _ends_of(source, name).cpu()
        digest.update(name.encode())
        digest.update(own.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _read(source: Source, name: str, where: tuple[Range, ...]) -> tuple[Tensor, Tensor]:
    """A tensor, or places of it, and its first and last row."""
    shape = source.headers[name].shape
    if where == tuple(Range(0, size) for size in shape[: len(where)]):
        tensor = source.read(name)
        ends = torch.stack([_row(tensor, end) for end in (0, -1)])
        return tensor, ends if tensor.dim() else ends[:1]
    return source.read(name, *where), _ends_of(source, name)


def _ends_of(source: Source, name: str) -> Tensor:
    """The first and last row of a tensor."""
    shape = source.headers[name].shape
    if not shape:
        return source.read(name).reshape(1)
    rows = []
    for last in (False, True):
        first = [size - 1 if last else 0 for size in shape[:-1]] or [shape[0] - 1 if last else 0]
        rows.append(_row(source.read(name, *(Range(at, at + 1) for at in first)), 0))
    return torch.stack(rows)


def _row(tensor: Tensor, end: int) -> Tensor:
    """The first or the last row of a tensor of any number of dimensions."""
    return (
        tensor.reshape(-1, tensor.shape[-1])[end] if tensor.dim() > 1 else tensor.reshape(-1)[end]
    )
