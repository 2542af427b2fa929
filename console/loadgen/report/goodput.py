"""Goodput: the highest rate at which enough requests keep the service levels, by bisection.

1. Beginning at the first rate, the search doubles the rate while it is sustained, or halves it
   while it is not. Then one sustained rate and one higher, missed rate are known. Halving stops
   when requests hardly overlap: a lower rate cannot help an idle server.
2. The search tries the geometric mean of the two rates until they are close enough.

Every probe is a run with a seed of its own. Arrivals are random, so a rate near the limit may be
sustained or missed by chance. The width of the interval is the precision of the answer; more
requests a probe make it more certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from console.loadgen.report.summary import Summary

RANGE: Final = 256.0
"""The search tries rates up to this many times above and below the first one."""
IDLE: Final = 0.1
"""With fewer requests under way on average, the server counts as idle."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result of a search."""

    rate: float
    """The highest sustained rate, requests a second; 0: none was sustained."""
    missed_rate: float | None
    """The lowest rate that was not sustained; None: all were."""
    wanted_attainment: float
    probes: tuple[Summary, ...]
    """All runs, in their order."""

    def by_rate(self) -> list[Summary]:
        """All runs, the lowest rate first."""
        return sorted(self.probes, key=lambda probe: probe.offered_rate)


def search(
    probe: Callable[[float], Summary],
    first_rate: float,
    wanted_attainment: float,
    tolerance: float,
    max_probes: int,
) -> Goodput:
    """Searches the highest sustained rate.

    Args:
        probe: runs a load at a rate.
        first_rate: rate of the first run, requests a second.
        wanted_attainment: share of the requests that must keep the service levels.
        tolerance: the search ends when sustained and missed rate differ by at most this share.
        max_probes: the search ends after this many runs at the latest.
    """
    probes: list[Summary] = []

    def sustained(rate: float) -> bool:
        probes.append(probe(rate))
        return (probes[-1].attainment or 0.0) >= wanted_attainment

    good, missed = 0.0, math.inf
    rate = first_rate
    while len(probes) < max_probes and first_rate / RANGE <= rate <= first_rate * RANGE:
        if sustained(rate):
            good = max(good, rate)
        else:
            missed = min(missed, rate)
        if good and missed <= good * (1 + tolerance):
            break
        if not good and _idle(probes[-1]):
            break
        rate = _next(rate, good, missed)
    return Goodput(
        rate=good,
        missed_rate=None if math.isinf(missed) else missed,
        wanted_attainment=wanted_attainment,
        probes=tuple(probes),
    )


def _idle(probe: Summary) -> bool:
    """Whether requests hardly ever overlapped."""
    return probe.e2e_ms is not None and probe.offered_rate * probe.e2e_ms.mean / 1e3 < IDLE


def _next(rate: float, good: float, missed: float) -> float:
    if not good:
        return rate / 2
    if math.isinf(missed):
        return rate * 2
    return math.sqrt(good * missed)
