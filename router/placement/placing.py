"""The rule that places every prompt: it goes where it is computed soonest.

For each worker that could compute a prompt of n tokens,

    finish_s = wait_s + n / rate        wait_s = queued tokens / rate

and the smallest wins. The rule chooses among prefill workers, and between them and decode workers
where `local_prefill` is `auto`. For a prompt that a decode worker holds in part, it says how many
tokens that worker may compute and still be sooner (`takeover_tokens`): only the worker knows what
it holds. `docs/placing.md` has an example.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.workers.load_estimate import Capacity

FRESH_S: Final = 30.0
"""A rate that was measured longer ago counts as unknown. A worker whose rate was too low gets no
prompts, and so could never show a better one."""
NO_LIMIT: Final = (1 << 32) - 1
"""More tokens than any prompt has; fits the message's uint32."""


class LocalReason(enum.StrEnum):
    """Why a decode worker computes a prompt."""

    NO_PREFILL_WORKER = "no_prefill_worker"
    """None is left that has not failed the job."""
    CACHED = "cached"
    """It holds the larger part of the prompt, and is sooner done with the rest."""
    FASTER = "faster"
    """It is sooner done than the prefill workers' queues allow."""


def rate_of_unmeasured(capacities: Sequence[Capacity]) -> float:
    """The rate of a worker that has not measured its own of late, tokens per second.

    It is the fastest of those measured of late, else the fastest known. Where none is known every
    worker is taken to be equally fast, so that the queues alone decide.

    Args:
        capacities: of the prefill workers that could compute the prompt.
    """
    fresh = [one.prefill_tokens_per_s for one in capacities if one.prefill_rate_age_s <= FRESH_S]
    known = [one.prefill_tokens_per_s for one in capacities]
    return max(fresh, default=0.0) or max(known, default=0.0) or 1.0


def finish_s(capacity: Capacity, tokens: int, unmeasured: float) -> float:
    """Seconds until a worker has computed a prompt of so many tokens behind all that it has."""
    return (capacity.queued_prefill_tokens + tokens) / _rate(capacity, unmeasured)


def soonest(capacities: Sequence[Capacity], tokens: int, unmeasured: float) -> int:
    """Index of the worker that computes the prompt soonest; of equals the first."""
    finishes_s = [finish_s(one, tokens, unmeasured) for one in capacities]
    return finishes_s.index(min(finishes_s))


def takeover_tokens(prefill: Capacity, decode: Capacity, tokens: int) -> int:
    """How many tokens of a prompt the decode worker may compute and be done no later than the
    prefill worker with the whole of it:

        (finish_s(prefill) - wait_s(decode)) x rate(decode)
    """
    unmeasured = rate_of_unmeasured([prefill])
    rate = _rate(decode, unmeasured)
    left_s = finish_s(prefill, tokens, unmeasured) - finish_s(decode, 0, unmeasured)
    return min(NO_LIMIT, max(0, math.floor(left_s * rate)))


def _rate(capacity: Capacity, unmeasured: float) -> float:
    is_fresh = capacity.prefill_rate_age_s <= FRESH_S
    return (capacity.prefill_tokens_per_s if is_fresh else 0.0) or unmeasured
