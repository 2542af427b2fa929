"""Where a router reads the tokenizer of a model that a worker announced.

A worker names the model and the folder from which it read it. It is believed as to the name alone,
unless its folder lies where the router's operator allows it. So no worker makes a router read a
folder of the router's host.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from baton.worker.v1 import worker_pb2

logger = logging.getLogger(__name__)


class ModelFolders(Protocol):
    """Finds the folders of models."""

    def find(self, model: worker_pb2.ModelInfo) -> str:
        """The folder with a model's tokenizer; "" if it may be read nowhere."""
        ...


class AnyFolder:
    """Believes the worker: for routers that processes of this host alone can reach."""

    def find(self, model: worker_pb2.ModelInfo) -> str:
        """See `ModelFolders`."""
        return model.path


class AllowedFolders:
    """Finds folders below some that the operator named. Links are followed before that is judged.

    Args:
        roots: these folders.
    """

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [Path(root).resolve() for root in roots]

    def find(self, model: worker_pb2.ModelInfo) -> str:
        """See `ModelFolders`. The announced folder comes first, then one of the model's name."""
        named = (root / model.name for root in self._roots if model.name)
        for folder in (Path(model.path), *named) if model.path else named:
            if self._holds(folder):
                return str(folder.resolve())
        logger.warning(
            "no tokenizer is read for the model: its folder is not in model_dirs",
            extra={"model": model.name, "folder": model.path},
        )
        return ""

    def _holds(self, folder: Path) -> bool:
        try:
            where = folder.resolve()
            inside = (where, *where.parents)
            return where.is_dir() and any(root in inside for root in self._roots)
        except (OSError, ValueError):  # It is no path: too long, or with a zero byte.
            return False
