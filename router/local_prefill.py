"""When a decode worker computes a prompt by itself, without a prefill worker.

Four reasons, and who finds them:

- NO_PREFILL_WORKER: none is left that has not failed the job. The router sees it.
- CACHED: the decode worker holds all but a short rest of the prompt. Only that worker knows what it
  holds, so the attempt is submitted as for a hand-off, with the most tokens that it may compute
  itself; it answers `taken_over` in the place of `granted`, and the prefill worker is let go. An
  attempt that it does not take over pays nothing for the question.
- FASTER: the prefill workers' queue is long enough that the decode worker is sooner done, by
  `break_even_tokens`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from router.ledger import Room
    from router.settings import RouterSettings

NO_LIMIT: Final = (1 << 32) - 1
"""More tokens than any prompt has; fits the message's uint32."""


class LocalReason(enum.StrEnum):
    """Why a decode worker computes a prompt."""

    NO_PREFILL_WORKER = "no_prefill_worker"
    CACHED = "cached"
    FASTER = "faster"


class LocalPrefill(NamedTuple):
    """What an operator allows."""

    allowed: bool = True
    """Off: a prompt is computed by a prefill worker or not at all."""
    weighs_queues: bool = False
    """FASTER counts, too."""
    rest_tokens: int = 192
    """Longest rest of a prompt of which the decode worker holds the larger part."""

    @classmethod
    def of(cls, settings: RouterSettings) -> LocalPrefill:
        """What the settings say."""
        setting = settings.local_prefill
        return cls(
            setting != "never",
            setting == "auto",
            settings.local_prefill_tokens,
        )


def break_even_tokens(prefills: Iterable[Room], decode: Room) -> int:
    """How many prompt tokens the decode worker computes no later than any prefill worker would.

    With a queue of q tokens and a rate of r tokens per second, n more are computed after
    q / r + n / r. A prefill worker is the faster one (it runs chunks of thousands, a decode worker
    of some 200 beside its batch), so where its queue is the longer one it loses for short prompts
    and wins for long ones. The two are level at

        n = (q_p / r_p - q_d / r_d - s) / (1 / r_d - 1 / r_p)

    where s is what the decode worker's steps add: a prompt joins the next one but one, as often as
    not, and its last piece takes a whole step.

    The hand-off itself is not counted: the first token does not wait for it. Idle prefill
    workers make n zero, so nothing is moved off them, and what a decode worker takes on lengthens
    q_d, so that it takes on less and less: its batch is never flooded. Where it is no slower than
    the prefill worker, the queues alone decide.

    Returns 0 where no prefill worker has measured its rate yet: nobody knows.
    """
    return min((_level(prefill, decode) for prefill in prefills), default=0)


def local_tokens_per_s(decode: Room, prefill_tokens_per_s: float) -> float:
    """The rate at which a decode worker computes a prompt now; a prefill worker's while unknown."""
    return decode.prefill_tokens_per_s or prefill_tokens_per_s


def _level(prefill: Room, decode: Room) -> int:
    rate = prefill.prefill_tokens_per_s
    if not rate:
        return 0
    local_rate = local_tokens_per_s(decode, rate)
    sooner_s = prefill.wait_s(rate) - decode.wait_s(local_rate)
    if sooner_s <= 0:
        return 0
    slower_s = 1 / local_rate - 1 / rate
    return math.floor(min(NO_LIMIT, sooner_s / slower_s)) if slower_s > 0 else NO_LIMIT
