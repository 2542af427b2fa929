"""When a decode worker computes a prompt by itself, without a prefill worker.

Four reasons, and who finds them:

- NO_PREFILL_WORKER: none is left that has not failed the job. The router sees it.
- CACHED: the decode worker holds all but a short rest of the prompt. Only that worker knows what it
  holds, so the attempt is submitted as for a hand-off, with the most tokens that it may compute
  itself; it answers `taken_over` in the place of `granted`, and the prefill worker is let go. An
  attempt that it does not take over pays nothing for the question.
- FASTER: the prefill workers' queue is long enough that the decode worker is sooner done, by
  `break_even_tokens`.
- URGENT: it would wait long either way, and the decode worker may let others' tokens come late for
  it (`engine.late_budget`): it computes it in long steps.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from router.ledger import Room
    from router.settings import RouterSettings

NO_LIMIT: Final = (1 << 32) - 1
"""More tokens than any prompt has; fits the message's uint32."""
STEPS_LOST: Final = 1.5


class LocalReason(enum.StrEnum):
    """Why a decode worker computes a prompt."""

    NO_PREFILL_WORKER = "no_prefill_worker"
    CACHED = "cached"
    FASTER = "faster"
    URGENT = "urgent"


class LocalPrefill(NamedTuple):
    """What an operator allows."""

    allowed: bool = True
    """Off: a prompt is computed by a prefill worker or not at all."""
    weighs_queues: bool = False
    """FASTER and URGENT count, too."""
    rest_tokens: int = 192
    """Longest rest of a prompt of which the decode worker holds the larger part."""
    urgent_factor: float = 2.8
    """A prompt is urgent whose first token would come after so many times what it takes by
    itself."""

    @classmethod
    def of(cls, settings: RouterSettings) -> LocalPrefill:
        """What the settings say."""
        setting = settings.local_prefill
        return cls(
            setting != "never",
            setting == "auto",
            settings.local_prefill_tokens,
            settings.urgent_factor,
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
    """The rate at which a decode worker computes a prompt now.

    Beside a batch, what it measured in such steps. Before it has, each chunk is taken to lengthen a
    step by what it takes at the prefill worker's rate, which is cautious: a decode that waits for
    memory has time to spare. Without a batch it is a prefill worker like another, of the same rate
    while it has measured none.
    """
    if not decode.running_sequences:
        return decode.prefill_tokens_per_s or prefill_tokens_per_s
    if decode.mixed_prefill_tokens_per_s:
        return decode.mixed_prefill_tokens_per_s
    chunk_tokens = max(1, decode.mixed_prefill_tokens)
    return chunk_tokens / (decode.step_ms / 1e3 + chunk_tokens / prefill_tokens_per_s)


def is_urgent(
    prefills: Sequence[Room],
    decodes: Sequence[Room],
    tokens: int,
    waited_s: float,
    factor: float,
) -> bool:
    """Whether a prompt of so many tokens, which waited for so long already, would wait long yet,
    wherever it is computed at the usual pace. Never where a prefill worker's rate is unknown.

    Args:
        prefills: not empty.
        decodes: those that could compute it by themselves.
        tokens: of the prompt.
        waited_s: in the router.
        factor: long is more than so many times what it takes by itself.
    """
    rate = min(room.prefill_tokens_per_s for room in prefills)
    if not rate:
        return False
    done_s = [_done_s(room, room.prefill_tokens_per_s, tokens) for room in prefills]
    for room in decodes:
        local_rate = local_tokens_per_s(room, rate)
        done_s.append(_done_s(room, local_rate, tokens) + _steps_s(room, local_rate))
    soonest_s = min(done_s)
    return waited_s + soonest_s > factor * tokens / rate


def can_hurry(prefills: Iterable[Room], decode: Room, tokens: int) -> bool:
    """Whether the decode worker may compute the prompt, and all before it, in long steps, and is
    sooner done so than any prefill worker."""
    if decode.queued_prefill_tokens + tokens > decode.late_prefill_tokens:
        return False
    rates = [(room, room.prefill_tokens_per_s) for room in prefills]
    rate = decode.late_prefill_tokens_per_s or max(rate for _, rate in rates)
    return _done_s(decode, rate, tokens) < min(_done_s(*at, tokens) for at in rates)


def _steps_s(decode: Room, tokens_per_s: float) -> float:
    """What is lost at a decode worker to the steps that the others are in."""
    piece = decode.mixed_prefill_tokens if decode.running_sequences else 0
    return STEPS_LOST * piece / tokens_per_s


def _done_s(room: Room, tokens_per_s: float, tokens: int) -> float:
    return room.wait_s(tokens_per_s) + tokens / tokens_per_s


def _level(prefill: Room, decode: Room) -> int:
    rate = prefill.prefill_tokens_per_s
    if not rate:
        return 0
    local_rate = local_tokens_per_s(decode, rate)
    sooner_s = prefill.wait_s(rate) - decode.wait_s(local_rate) - _steps_s(decode, local_rate)
    if sooner_s <= 0:
        return 0
    slower_s = 1 / local_rate - 1 / rate
    return math.floor(min(NO_LIMIT, sooner_s / slower_s)) if slower_s > 0 else NO_LIMIT
