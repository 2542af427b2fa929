"""The snapshot that an engine gives of itself, and its parts."""

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


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The slots for adapters, and what happened there since the start."""

    resident: tuple[bytes, ...]
    """Digests of the adapters in slots: those in use, then those that were used last."""
    slots: int
    idle_slots: int
    """Slots whose adapter no request uses, and empty ones."""
    loads: int
    """How often a slot got another adapter."""
    evictions: int
    """How often one had to leave its slot for that."""
    waits: int
    """Requests that had to wait until a slot was idle, and got it."""
    waited_s: float
    """How long they waited, all together."""
    recent_wait_s: float
    """How long such a request waits, on average; 0: none did lately."""
    in_host: tuple[bytes, ...] | None = None
    """Digests of those in host memory, those that were used last first; None: all that are
    loaded."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of the engine, replaced by the step loop every turn; read from any thread."""

    progress: int = 0
    """Turns of the step loop, with idle ones (at least one in 0.5 s)."""
    queued_prefill_tokens: int = 0
    """Prompt tokens to be computed here, with those of steps in flight."""
    requests: frozenset[bytes] = frozenset()
    """Ids of the requests that the engine holds and that the other numbers contain."""
    waiting_requests: int = 0
    wanted_pages: int = 0
    """Pages for which requests without pages wait, and those kept back for the growth of others."""
    wanted_sequences: int = 0
    """Slots for which such requests wait."""
    running_sequences: int = 0
    max_sequences: int = 0
    total_pages: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    granted_pages: int = 0
    quarantined_pages: int = 0
    damaged_pages: int = 0
    """Pages found written while they were free, if that is checked. Must stay 0."""
    step_ms: float = 0.0
    """Duration of the last step, launch to settled."""
    long_step_ms: float = 0.0
    """Expected duration of the step in flight, if it is long; else 0. Progress may pause this
    long."""
    prefill_tokens_per_s: float = 0.0
    """Moving average of the rate at which steps compute prompt tokens; 0 while unknown."""
    prefill_rate_age_s: float = 0.0
    """Time since a step last added to that rate."""
    prefill_token_s: float = 0.0
    """Time to compute a prompt token without tokens before it; 0 while unknown."""
    prefill_context_s: float = 0.0
    """How much longer it takes for each token before it."""
    piece_delay_ms: float = 0.0
    """How much longer a step that decodes takes with a prompt's chunk; 0 while unknown."""
    piece_tokens: float = 0.0
    """Prompt tokens of such a chunk, on average."""
    steps: int = 0
    preemptions: int = 0
    beam_searches: int = 0
    """Beam searches that have ended."""
    beam_forks: int = 0
    """Beams that went on from the pages of another one."""
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_loaded: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens that came from beyond the pool, by source: a tier, or peers."""
    tokens_sampled: int = 0
    tiers: TierLoad | None = None
    """The tiers below the pool; None: there are none."""
    groups: tuple[GroupLoad, ...] = ()
    """The pages of each group of layers; empty where there is one."""
    prompt_tokens_unresumable: int = 0
    """Prompt tokens that group 0 knew and that were computed, for a window before them was gone."""
    hook_failures: Mapping[tuple[str, str], int] | None = None
    """Failures of hooks, by hook and point; None: there are no hooks."""
    speculation: SpeculationLoad | None = None
    """None: drafts are off."""
    adapters: AdapterLoad | None = None
    """None: the engine takes none."""
