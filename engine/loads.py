"""Parts of the snapshot that an engine gives of itself (`engine.types.EngineLoad`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class TierLoad:
    """The tiers below the pool, since the start. Mappings are by a tier's name or as they say."""

    loaded_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens whose pages came into the pool, by the tier that had them."""
    decisions: Counter[str] = field(default_factory=Counter)
    """Prompts that were found below the pool: `loaded`, or why not."""
    late: Counter[str] = field(default_factory=Counter)
    """Copies that were late or failed, by direction."""
    bytes_moved: dict[str, int] = field(default_factory=dict)
    """By direction."""
    bytes_per_s: dict[str, float] = field(default_factory=dict)
    """Moving average, by direction."""
    slots: int = 0
    held_slots: int = 0
    """Slots that a copy reads or writes."""
    cached_slots: int = 0


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Pages of a group of layers, of a model that has several."""

    name: str
    total_pages: int
    free_pages: int
    evictable_pages: int


@dataclass(frozen=True, slots=True)
class SpeculationLoad:
    """Drafts since the start."""

    drafted_by_position: tuple[int, ...]
    """Drafts that were verified, by their place among a row's drafts."""
    accepted_by_position: tuple[int, ...]
    steps_by_width: Mapping[int, int]
    """Steps that decoded, by the tokens of each row."""

    @property
    def drafted_tokens(self) -> int:
        """All drafts that were verified."""
        return sum(self.drafted_by_position)

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens that were the tokens drawn."""
        return sum(self.accepted_by_position)
