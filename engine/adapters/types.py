"""An adapter: for some products of a model a pair of thin matrices that adds to them (Hu et al.
2021, "LoRA").

Shapes: N outputs and K inputs of a product, R the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import NamedTuple, Protocol

from torch import Tensor

DIGEST_BYTES = 32
"""Bytes of an adapter's digest."""


class AdapterError(Exception):
    """An adapter cannot be used; the message says which field or file, and what would do."""


class AdapterUnreadError(AdapterError):
    """Its files cannot be read now: one is missing, or reading fails. Another time they may be."""


class Opened(Protocol):
    """Memory that other processes may open (`engine.adapters.shared`)."""

    memory: mmap
    """All of it."""

    @property
    def path(self) -> str:
        """By which they do."""
        ...


class LowRank(NamedTuple):
    """What is added to a product x W^T: scale * (x A^T) B^T."""

    a: Tensor
    """[R, K]"""
    b: Tensor
    """[N, R]"""
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The content of one, in host memory."""

    digest: bytes
    """SHA-256 over what of its config counts, and its tensors."""
    modules: Mapping[str, LowRank]
    """By names of modules in the model's checkpoint."""
    rank: int
    """Largest one of its modules."""
    base: str = ""
    """The model that it says it was trained on."""
    file: Opened | None = None
    """Its memory, where other ranks map it."""

    @property
    def num_bytes(self) -> int:
        """Host memory that it takes."""
        return sum(
            each.numel() * each.element_size()
            for pair in self.modules.values()
            for each in (pair.a, pair.b)
        )


class AdapterInfo(NamedTuple):
    """What is reported of a loaded adapter."""

    name: str
    digest: bytes
    rank: int
    num_bytes: int
    path: str
