"""Adapters of an engine: whether it can have them, what reads them, and where they add."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import torch

from engine.adapters.registry import Adapters
from engine.adapters.types import AdapterError
from engine.config import EngineConfig
from engine.model import LoadedModel
from engine.model.adapters.reading import Limits, read_adapter
from engine.model.adapters.sites import AdapterSites, shapes_of
from engine.parts.paging import EngineError

ON_CPU: Final = torch.float32
"""In which pairs are kept and multiplied there."""


def check_adapters(config: EngineConfig, device: str) -> None:
    """Whether an engine can have adapters as configured.

    Raises:
        EngineError: it cannot; the reason is named.
    """
    if not config.max_adapters:
        if config.adapters:
            raise EngineError("adapters need max_adapters above 0")
        return
    if torch.device(device).type != "cpu":
        raise EngineError(
            "adapters have no kernels on GPUs yet: set device to cpu, or max_adapters to 0"
        )
    if config.tp > 1:
        raise EngineError(f"adapters with tp {config.tp} are not built yet: set tp to 1")


def adapters_of(config: EngineConfig, loaded: LoadedModel) -> Adapters:
    """The adapters of an engine; those of its configuration are loaded.

    Raises:
        EngineError: one does not fit.
    """
    if not config.max_adapters:
        return Adapters()
    limits = Limits(config.max_adapter_rank, config.adapters_host_bytes)
    read = partial(read_adapter, shapes=shapes_of(loaded.model), limits=limits, dtype=ON_CPU)
    adapters = Adapters(read, config.adapters_host_bytes)
    for named in config.adapters:
        name, equals, path = named.partition("=")
        if not equals or not path:
            raise EngineError(f"adapters: {named!r} is not name=folder")
        try:
            adapters.load(name, Path(path))
        except AdapterError as error:
            raise EngineError(f"adapter {name!r}: {error}") from error
    return adapters


def sites_of(config: EngineConfig, loaded: LoadedModel) -> AdapterSites | None:
    """Where adapters add to a rank's part of a model; None: there are none."""
    return AdapterSites(loaded.model) if config.max_adapters else None
