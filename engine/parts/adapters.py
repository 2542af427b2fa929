"""Adapters of an engine: whether it can have them, what reads them, and where they add."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from engine.adapters.registry import Adapters, check_name
from engine.adapters.shared import shared
from engine.adapters.types import Adapter, AdapterError
from engine.config import EngineConfig
from engine.cuda import features
from engine.model import LoadedModel
from engine.model.adapters.reading import Limits, look_at, read_adapter
from engine.model.adapters.sites import AdapterSites, linears_of, shapes_of
from engine.parts.paging import EngineError, dtype_of

if TYPE_CHECKING:
    from engine.cuda.adapters.sites import CudaAdapterSites

ON_CPU: Final = torch.float32
"""In which pairs are kept and multiplied there."""


def check_adapters(config: EngineConfig) -> None:
    """Whether an engine can have adapters as configured, as far as their folders say it: weights
    take minutes to read.

    Raises:
        EngineError: it cannot; the reason is named.
    """
    if config.adapters and not config.max_adapters:
        raise EngineError("adapters need max_adapters above 0")
    named = [_named(each) for each in config.adapters]
    for name, folder in named:
        try:
            check_name(name)
            look_at(folder, _limits(config))
        except AdapterError as error:
            raise EngineError(f"adapter {name!r}: {error}") from error
        if len({other for own, other in named if own == name}) > 1:
            raise EngineError(f"adapters: {name!r} names two folders")


def _named(stated: str) -> tuple[str, Path]:
    name, equals, path = stated.partition("=")
    if not equals or not path:
        raise EngineError(f"adapters: {stated!r} is not name=folder")
    return name, Path(path)


def _limits(config: EngineConfig) -> Limits:
    return Limits(config.max_adapter_rank, config.adapters_host_bytes)


def with_adapters(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> LoadedModel:
    """A model whose products take adapters, if they are wanted."""
    if not config.max_adapters:
        return loaded
    if device.type == "cpu" or features.obstacle(loaded.config):
        return replace(loaded, adapters=AdapterSites(loaded.model))
    linears = linears_of(loaded.model)
    from engine.cuda.adapters.sites import CudaAdapterSites

    own = config.max_adapters, config.max_adapter_rank, dtype_of(config.dtype)
    return replace(loaded, adapters=CudaAdapterSites(linears, *own))


def sites_of(loaded: LoadedModel) -> AdapterSites | None:
    """Where adapters add in steps with PyTorch. Attention may not have let a GPU have others."""
    found = loaded.adapters
    return found if found is None or isinstance(found, AdapterSites) else AdapterSites(loaded.model)


def cuda_sites_of(loaded: LoadedModel) -> CudaAdapterSites | None:
    """Where adapters add in steps with fused kernels."""
    if loaded.adapters is None:
        return None
    from engine.cuda.adapters.sites import CudaAdapterSites

    assert isinstance(loaded.adapters, CudaAdapterSites), "a CPU runs steps with PyTorch"
    return loaded.adapters


def adapters_of(config: EngineConfig, loaded: LoadedModel) -> Adapters:
    """The adapters of an engine; those of its configuration are loaded.

    Raises:
        EngineError: one does not fit.
    """
    if not config.max_adapters:
        return Adapters()
    limits, on_gpu = _limits(config), config.device != "cpu"
    shapes = shapes_of(linears_of(loaded.whole or loaded.model))
    dtype = dtype_of(config.dtype) if on_gpu else ON_CPU

    def read(folder: Path, within: Path | None) -> Adapter:
        found = read_adapter(folder, shapes, limits, dtype, within)
        if config.ranks > 1:
            return shared(found)
        return pinned(found) if on_gpu and torch.cuda.is_available() else found

    adapters = Adapters(read, config.adapters_host_bytes)
    for name, folder in map(_named, config.adapters):
        try:
            adapters.load(name, folder)
        except AdapterError as error:
            raise EngineError(f"adapter {name!r}: {error}") from error
    return adapters


def pinned(adapter: Adapter) -> Adapter:
    """An adapter in memory that a GPU reads by itself."""
    pairs = {
        name: pair._replace(a=pair.a.pin_memory(), b=pair.b.pin_memory())
        for name, pair in adapter.modules.items()
    }
    return replace(adapter, modules=pairs)
