"""Transfers that are overdue: their stats for metrics, and the peers that are avoided for them.

A quarantine ends within milliseconds if the other side lives and can be reached. So does a send,
once its prompt is computed or given up. If one takes longer than `OVERDUE_S`, one of the workers or
the path between them hangs, even if everything else looks well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

OVERDUE_S: Final = 5.0
"""This is longer than it takes to notice a frozen worker and to get answers by the second path."""
QUARANTINE_OVERDUE: Final = "quarantine_overdue"
"""The peer is avoided: it does not say whether its writes can still land."""
SENDS_STUCK: Final = "sends_stuck"
"""The peer is avoided: writes do not get through to it."""
SHARE_FULL: Final = "share_full"
"""The peer is avoided: it holds too many pages of this worker in quarantine."""


class Unended(NamedTuple):
    """A transfer in quarantine, or a send with nothing left to compute."""

    peer: str
    """Agent name of the other side."""
    age_s: float


class Overdue(NamedTuple):
    """Overdue transfers on both sides of this worker's hand-offs."""

    quarantines: int
    """Quarantines older than `OVERDUE_S`."""
    oldest_quarantine_s: float
    """Age of the oldest, overdue or not; 0 without one."""
    sends: int
    oldest_send_s: float


def overdue(quarantines: Iterable[Unended], sends: Iterable[Unended]) -> Overdue:
    """Counts overdue transfers."""
    return Overdue(*_count_and_oldest(quarantines), *_count_and_oldest(sends))


def peers_to_avoid(
    quarantines: Iterable[Unended], sends: Iterable[Unended], crowding: Iterable[str]
) -> dict[str, str]:
    """Reasons by agent name: peers with an overdue transfer, and peers that crowd the pool."""
    causes = {one.peer: SENDS_STUCK for one in sends if one.age_s > OVERDUE_S}
    causes |= {one.peer: QUARANTINE_OVERDUE for one in quarantines if one.age_s > OVERDUE_S}
    return causes | dict.fromkeys(crowding, SHARE_FULL)


def _count_and_oldest(transfers: Iterable[Unended]) -> tuple[int, float]:
    ages_s = [one.age_s for one in transfers]
    return sum(age_s > OVERDUE_S for age_s in ages_s), max(ages_s, default=0.0)
