"""The rule that places every prompt: it goes to the worker that would finish it first.

For each worker that could compute a prompt of n tokens,

    finish_s = wait_s + n / rate        wait_s = queued tokens / rate

and the smallest wins. The rule chooses among prefill workers, and between them and decode workers
where `local_prefill` is `auto`. `router.placement.cost` extends it by what workers hold of the
prompt:

    finish_s = wait_s + load or fetch + the rest of n / rate(context) + delay of streams

A decode worker may hold more of a prompt than the router knows. For this case the rule gives the
most tokens that the worker may compute and still finish first (`takeover_tokens`).
`docs/placing.md` has examples.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from router.workers.load_estimate import Capacity

FRESH_S: Final = 30.0
"""A rate older than this many seconds counts as unknown. Otherwise a worker with too low a rate
would get no prompts and could never show a better one."""
NO_LIMIT: Final = (1 << 32) - 1
"""More tokens than any prompt has; fits the message's uint32."""


class LocalReason(enum.StrEnum):
    """The reason for which a decode worker computes a prompt."""

    NO_PREFILL_WORKER = "no_prefill_worker"
    """No prefill worker is left that has not failed the job."""
    CACHED = "cached"
    """It holds the larger part of the prompt and would finish the rest first."""
    FASTER = "faster"
    """It would finish the prompt before any prefill worker."""


class MixedChunk(NamedTuple):
    """A prompt's chunk that is computed beside decode rows, on average."""

    tokens: float = 0.0
    """0 while unknown."""
    delay_s: float = 0.0
    """How much longer the step takes with it, seconds."""


def usual_chunk(capacities: Sequence[Capacity]) -> MixedChunk:
    """The chunk of workers that are alike: the mean of what each of them has measured.

    A worker's own figure is not used where workers are compared. It is multiplied by dozens of
    rows, so that an error of a millisecond would outweigh a prompt in the queue. And it changes
    only while the worker computes prompts. So one whose figure was too high for a moment would get
    no prompt, and all of them would go to another until its figure was higher.
    """
    known = [one for one in capacities if one.piece_tokens and one.piece_delay_s]
    if not known:
        return MixedChunk()
    tokens = sum(one.piece_tokens for one in known) / len(known)
    return MixedChunk(tokens, sum(one.piece_delay_s for one in known) / len(known))


def rate_of_unmeasured(capacities: Sequence[Capacity]) -> float:
    """The assumed rate of a worker without a fresh rate, tokens per second.

    It is the fastest fresh rate, else the fastest known one. If no rate is known, every worker
    counts as equally fast, so that the queues alone decide.

    Args:
        capacities: those of the prefill workers that could compute the prompt.
    """
    fresh = [one.prefill_tokens_per_s for one in capacities if one.prefill_rate_age_s <= FRESH_S]
    known = [one.prefill_tokens_per_s for one in capacities]
    return max(fresh, default=0.0) or max(known, default=0.0) or 1.0


def finish_s(capacity: Capacity, tokens: int, unmeasured: float) -> float:
    """Seconds until a worker finishes a prompt of `tokens` tokens behind its queue."""
    return (capacity.queued_prefill_tokens + tokens) / _rate(capacity, unmeasured)


def rest_s(capacity: Capacity, cached: int, tokens: int, unmeasured: float) -> float:
    """Seconds to compute the tokens of a prompt from `cached` on, without a queue. A token takes
    longer the more tokens are before it."""
    return (tokens - cached) * _token_s(capacity, (cached + tokens) / 2, unmeasured)


def delay_s(capacity: Capacity, chunk: MixedChunk, tokens: int) -> float:
    """Seconds by which `tokens` prompt tokens delay the streams that the worker decodes, all
    streams together. Each chunk of the prompt delays every row."""
    if tokens <= 0 or not chunk.tokens:
        return 0.0
    return max(1.0, tokens / chunk.tokens) * capacity.running_sequences * chunk.delay_s


def takeover_tokens(
    capacity: Capacity, chunk: MixedChunk, seconds: float, tokens: int, unmeasured: float
) -> int:
    """The most tokens at the end of a prompt of `tokens` tokens that a decode worker computes
    within `seconds`, its queue and the delay of its streams included. The prefill worker would have
    computed the prompt by then."""
    left_s = seconds - finish_s(capacity, 0, unmeasured)
    each_s = _token_s(capacity, tokens, unmeasured)
    if chunk.tokens:
        chunk_s = capacity.running_sequences * chunk.delay_s
        if chunk_s > left_s:
            return 0
        each_s += chunk_s / chunk.tokens
    return min(NO_LIMIT, max(0, math.floor(left_s / each_s)))


def pressure(capacity: Capacity) -> tuple[float, int]:
    """How full a decode worker is, for choosing the least full one: the used share of slots or of
    pages, whichever is larger; and, for ties, the running sequences. A step's time grows with the
    batch, and pages run out before slots if contexts are long."""
    used_slots = capacity.running_sequences / max(1, capacity.max_sequences)
    used_pages = 1 - capacity.free_pages / max(1, capacity.total_pages)
    return max(used_slots, used_pages), capacity.running_sequences


def _token_s(capacity: Capacity, context: float, unmeasured: float) -> float:
    """Seconds to compute a token with `context` tokens before it."""
    if capacity.prefill_rate_age_s <= FRESH_S and capacity.prefill_token_s:
        return capacity.prefill_token_s + capacity.prefill_context_s * context
    return 1 / _rate(capacity, unmeasured)


def _rate(capacity: Capacity, unmeasured: float) -> float:
    is_fresh = capacity.prefill_rate_age_s <= FRESH_S
    return (capacity.prefill_tokens_per_s if is_fresh else 0.0) or unmeasured
