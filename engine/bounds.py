"""The bounds of the engine, and the requests that it can hold within them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engine.types import Request

UNBOUNDED: Final = 1 << 31
"""More tokens than any step has."""
MOST_RANKS: Final = 64
"""Most ranks of a worker: more than the GPUs of a host. Not tuned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLimits:
    """How much of prompts a step takes. These may change while an engine runs, unlike its
    bounds."""

    alone_tokens: int = UNBOUNDED
    """Most prompt tokens in a step that decodes nothing."""
    mixed_tokens: int = UNBOUNDED
    """Most prompt tokens in a step that also decodes."""
    full_tokens: int = UNBOUNDED
    """See `Bounds.full_step_tokens`."""

    def at_least(self, tokens: int) -> PromptLimits:
        """These limits, where a prompt is cut behind multiples of so many tokens."""
        return replace(
            self,
            alone_tokens=max(tokens, self.alone_tokens),
            mixed_tokens=max(tokens, self.mixed_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of the engine. `Engine.build` replaces each 0."""

    max_sequences: int = 64
    """Slots of the batch."""
    max_step_tokens: int = 0
    """Most new tokens in a step: the chunk budget of prefill. 0 means 512 on a CPU; elsewhere it
    means 2048 if this engine decodes, else 4096."""
    mixed_prefill_tokens: int = UNBOUNDED
    """Most prompt tokens in a step that also decodes."""
    full_step_tokens: int = UNBOUNDED
    """Prompt tokens that keep the device busy. A prompt that would make a step longer than this
    waits for the next step, unless it is the step's first."""
    max_context_tokens: int = 0
    """Most tokens of one sequence, prompt and output. 0 means the model's limit, or less if the
    pool is smaller."""
    page_size: int = 16
    """Tokens in a page."""
    pp: int = 1
    """Stages of the model, one behind the other (pipeline parallelism)."""
    decodes: bool = True
    """Whether this engine decodes. If not, it makes no graphs for that."""
    flexible: bool = False
    """Whether `PromptLimits` may become those of an engine that only computes prompts: by default
    steps may be as long as there."""
    eos_token_ids: frozenset[int] = frozenset()
    """Set by `Engine.build` from the model."""
    kv_precision: str = ""
    """Set by `Engine.build` from the pool (`KvPool.precision`). Keys of pages name it."""
    gathers: bool = False
    """Set by `Engine.build` from the pool: whether the contexts of a step's prompts are gathered
    into a scratch (`KvPool.gathers`)."""
    reserve_pages: int = 1
    """Pages kept back at admission for the growth of each active sequence."""
    page_watermark: float = 0.9
    """Used share of the pages above which fewer sequences are admitted, in (0, 1]. 1 disables this.
    See `engine.schedule.admission.Admission.growth_reserve`."""
    max_passed_over: int = 16
    """Most times that smaller requests may pass one that does not fit yet."""
    prefix_cache: bool = True
    cut_tokens: int = 0
    """Set by `Engine.build` from the groups: prompts are cut behind multiples of so many tokens.
    0: of whole pages."""
    object_tokens: int = 0
    """Set by `Engine.build`: tokens from the end of an object in a store to that of the next; 0:
    there are no stores."""

    max_adapters: int = 0
    """Most adapters that the sequences in slots may use; 0: the engine takes none."""
    ahead_tokens: int = 0
    """Set by `Engine.build` from the drafter: it stores something at so many places behind those of
    a decode step."""

    @property
    def prompt_limits(self) -> PromptLimits:
        """Limits to begin with."""
        return PromptLimits(
            mixed_tokens=self.mixed_prefill_tokens, full_tokens=self.full_step_tokens
        )

    @property
    def chunk_tokens(self) -> int:
        """A prompt is cut behind multiples of so many tokens."""
        return self.cut_tokens or self.page_size

    @property
    def scratch_tokens(self) -> int:
        """Tokens of the scratch: the longest context, or the prompts of the largest step."""
        return max(self.max_context_tokens, self.max_step_tokens)

    def can_ever_hold(self, request: Request, total_pages: int) -> bool:
        """Whether an empty pool of `total_pages` could take the request to its end."""
        from engine.types import Mode  # It brings numpy, which settings do without.

        prompt = len(request.prompt_ids)
        slots, pages = self.extent_of(request)
        most = pages + 2 * (slots - 1)
        if request.beams is not None:  # They run together or not at all.
            shared = prompt // self.page_size
            most = shared + slots * (pages - shared)
        return (
            prompt > 0
            and prompt + request.stop.max_tokens <= self.max_context_tokens
            and slots <= self.max_sequences
            and most <= total_pages
            and not (request.generated and slots > 1 and request.mode is not Mode.WHOLE)
        )

    def extent_of(self, request: Request) -> tuple[int, int]:
        """The slots of a request, and the pages that each of its sequences has in the end."""
        prompt = len(request.prompt_ids)
        if not request.mode.decodes:
            resumed = len(request.generated[0]) if request.generated else 0
            return 1, -(-(prompt + resumed) // self.page_size)
        return request.choices, -(-(prompt + request.stop.max_tokens) // self.page_size)
