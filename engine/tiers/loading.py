"""Pages on their way into the pool, and where pages of a prompt are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.pages.blocks import BlockManager
from engine.tiers.lanes import Copy
from engine.tiers.protocol import Wait


@dataclass(eq=False, slots=True, kw_only=True)
class Load(Copy):
    """Pages on their way into the pool."""

    keys: list[bytes]
    tiers: Counter[str]
    """Pages by the tier that they come from."""
    waits: list[Wait] = field(default_factory=list)


class Looked(NamedTuple):
    """Where pages of a prompt are that follow each other."""

    found: list[int]
    """Pages in the pool."""
    missing: list[tuple[bytes, int]]
    """Key and slot of those that the host tier has."""
    joined: list[Load]
    """For each that is under way its load."""

    @property
    def total(self) -> int:
        """Pages in all."""
        return len(self.found) + len(self.missing) + len(self.joined)

    @property
    def is_here(self) -> bool:
        """Whether all are in the pool."""
        return not (self.missing or self.joined)


class HostKeys:
    """The keys that the host tier holds."""

    def __init__(self, host: BlockManager) -> None:
        self._host = host

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self._host.page_of(key) is not None
