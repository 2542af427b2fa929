"""What the engine is bounded by, and which requests can be held within that at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.types import Mode, Request

UNBOUNDED: Final = 1 << 31
"""Tokens: more than any step has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of the engine. `Engine.build` fills in what is 0."""

    max_sequences: int = 64
    """Slots of the batch."""
    max_step_tokens: int = 0
    """New tokens in a step: the chunk budget of prefill; 0: 512 on CPU, elsewhere 2048 where
    sequences are decoded and 4096 where not."""
    mixed_prefill_tokens: int = UNBOUNDED
    """Prompt tokens in a step that also decodes."""
    full_step_tokens: int = UNBOUNDED
    """Prompt tokens that keep the device busy. A prompt that would make a step longer than that
    waits for the next one, unless it is the step's first."""
    max_context_tokens: int = 0
    """Prompt and output of one sequence; 0: what the model takes, or less where the pool is
    smaller."""
    page_size: int = 16
    """Tokens in a page."""
    decodes: bool = True
    """Whether sequences are decoded here; if not, no graphs are made for it."""
    eos_token_ids: frozenset[int] = frozenset()
    """Set by `Engine.build` from the model."""
    reserve_pages: int = 1
    """Pages kept back at admission for the growth of each active sequence."""
    page_watermark: float = 0.9
    """Share of the pages in use above which fewer sequences are admitted, in (0, 1]; 1: never
    fewer. See `engine.schedule.admission.growth_reserve`."""
    max_passed_over: int = 16
    """How often smaller requests may be admitted before one that does not fit yet."""
    prefix_cache: bool = True

    def can_ever_hold(self, request: Request, total_pages: int) -> bool:
        """Whether an empty pool of `total_pages` could take the request to its end."""
        prompt = len(request.prompt_ids)
        longest = prompt + request.stop.max_tokens
        resumed = len(request.generated[0]) if request.generated else 0
        only_prefills = request.mode is Mode.PREFILL
        grown = prompt + resumed if only_prefills else longest
        slots = 1 if only_prefills else request.choices
        return (
            prompt > 0
            and longest <= self.max_context_tokens
            and slots <= self.max_sequences
            and -(-grown // self.page_size) + 2 * (slots - 1) <= total_pages
            and not (request.generated and slots > 1 and request.mode is not Mode.WHOLE)
        )
