"""Goodput: the highest rate at which enough requests keep the service levels, by bisection.

1. From the first rate on, rates double while they are sustained, or halve while they are not: now
   one is known that is, and a higher one that is not. Halving ends where requests hardly meet any
   more: what an idle server misses, no lower rate will mend.
2. The interval between them is halved, in ratio, until it is narrow enough.

Every probe is a run of its own with a seed of its own. Arrivals are random, so a rate near the edge
may fall on either side; the width of the interval says how exact the answer is, and the number of
requests of a probe how sure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.bench.summary import Summary

RANGE: Final = 256.0
"""Rates this many times above and below the first one are tried."""
IDLE: Final = 0.1
"""Fewer requests under way than this, on average, are as good as one by one."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """What a search found."""

    rate: float
    """The highest rate known to be sustained, requests a second; 0: none was."""
    missed_rate: float | None
    """The lowest known not to be; None: all were."""
    wanted_attainment: float
    probes: tuple[Summary, ...]
    """In the order in which they were run."""

    def by_rate(self) -> list[Summary]:
        """The probes, the lowest rate first."""
        return sorted(self.probes, key=lambda probe: probe.offered_rate)


def search(
    probe: Callable[[float], Summary],
    first_rate: float,
    wanted_attainment: float,
    tolerance: float,
    max_probes: int,
) -> Goodput:
    """Searches the rate.

    Args:
        probe: runs a load at a rate.
        first_rate: where to begin, requests a second.
        wanted_attainment: share of the requests that must keep the service levels.
        tolerance: the interval is narrow enough when its ends differ by this share.
        max_probes: the search ends there, whatever is left of the interval.
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
    """Whether requests hardly ever met."""
    return probe.e2e_ms is not None and probe.offered_rate * probe.e2e_ms.mean / 1e3 < IDLE


def _next(rate: float, good: float, missed: float) -> float:
    if not good:
        return rate / 2
    if math.isinf(missed):
        return rate * 2
    return math.sqrt(good * missed)
