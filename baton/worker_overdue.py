"""Transfers that ought to be over: what metrics say of them, and which peers are avoided for them.

A quarantine ends within milliseconds where the other side lives and is reached, and so does a send
once its prompt is computed or given up. Where one takes longer than `OVERDUE_S`, one of the two
workers hangs, or the path between them, even if everything else looks well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

OVERDUE_S: Final = 5.0
"""Longer than it takes to notice a frozen worker, and a second path's first answers."""
QUARANTINE_OVERDUE: Final = "quarantine_overdue"
"""Why a peer is to be avoided that does not say what of its writes can still land."""
SENDS_STUCK: Final = "sends_stuck"
"""Why a peer is to be avoided that writes do not get through to."""


SHARE_FULL: Final = "share_full"
"""Why a peer is to be avoided that holds too many pages of this worker in quarantine."""


class Unended(NamedTuple):
    """A transfer in quarantine, or a send that is under way with nothing left to compute."""

    peer: str
    """Agent name of the other side."""
    age_s: float


class Overdue(NamedTuple):
    """How both sides of this worker's hand-offs stand."""

    quarantines: int
    """Older than `OVERDUE_S`."""
    oldest_quarantine_s: float
    """Of any age; 0 without one."""
    sends: int
    oldest_send_s: float


def overdue(quarantines: Iterable[Unended], sends: Iterable[Unended]) -> Overdue:
    """The figures."""
    return Overdue(*_count_and_oldest(quarantines), *_count_and_oldest(sends))


def peers_to_avoid(
    quarantines: Iterable[Unended], sends: Iterable[Unended], crowding: Iterable[str]
) -> dict[str, str]:
    """Why, by agent name: peers with a transfer that is overdue, and those that crowd the pool."""
    causes = {one.peer: SENDS_STUCK for one in sends if one.age_s > OVERDUE_S}
    causes |= {one.peer: QUARANTINE_OVERDUE for one in quarantines if one.age_s > OVERDUE_S}
    return causes | dict.fromkeys(crowding, SHARE_FULL)


def _count_and_oldest(transfers: Iterable[Unended]) -> tuple[int, float]:
    ages_s = [one.age_s for one in transfers]
    return sum(age_s > OVERDUE_S for age_s in ages_s), max(ages_s, default=0.0)
