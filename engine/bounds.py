"""What the scheduler is bounded by, and which requests can be held within that at all."""

from __future__ import annotations

from dataclasses import dataclass

from engine.types import Mode, Request


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of the scheduler."""

    max_sequences: int
    """Slots."""
    max_step_tokens: int
    """Most new tokens in one step: the chunk budget of prefill."""
    mixed_prefill_tokens: int
    """Most prefill tokens in a step that also decodes."""
    max_context_tokens: int
    """Prompt and output of one sequence."""
    page_size: int
    eos_token_ids: frozenset[int]
    reserve_pages: int = 1
    """Pages kept back at admission for the growth of each active sequence."""
    page_watermark: float = 0.9
    """Share of the pages in use above which more is kept back (`engine.admission`); 1: never."""
    full_step_tokens: int = 1 << 31
    """Prompt tokens beyond which no further prompt is added to a step: it would delay those before
    it, and the device computes no more tokens a second."""
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
