"""In which order waiting requests are considered for admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.sequences import Job


class SchedulingPolicy(Protocol):
    """Orders waiting requests. Admission may still pass over one that does not fit, a bounded
    number of times."""

    def order(self, waiting: Sequence[Job], active: Iterable[Job]) -> Sequence[Job]:
        """The waiting requests (given in order of arrival), most urgent first."""
        ...


class Fcfs:
    """First come, first served."""

    def order(self, waiting: Sequence[Job], active: Iterable[Job]) -> Sequence[Job]:
        """As they came."""
        return waiting


class PriorityWithAgeing:
    """Higher priority first; a request gains one level for every `ageing` requests that arrived
    after it, so none starves."""

    def __init__(self, ageing: int = 64) -> None:
        self._ageing = ageing

    def order(self, waiting: Sequence[Job], active: Iterable[Job]) -> Sequence[Job]:
        """By priority plus age; ties by arrival."""
        newest = max((job.seniority for job in waiting), default=0)

        def urgency(job: Job) -> float:
            return -(job.request.priority + (newest - job.seniority) / self._ageing)

        return sorted(waiting, key=urgency)


class ShortestFirst:
    """Fewest prompt tokens first, each request's length shrinking as others arrive after it."""

    def __init__(self, tokens_forgiven_per_arrival: int = 16) -> None:
        self._forgiven = tokens_forgiven_per_arrival

    def order(self, waiting: Sequence[Job], active: Iterable[Job]) -> Sequence[Job]:
        """By aged length; ties by arrival."""
        newest = max((job.seniority for job in waiting), default=0)

        def length(job: Job) -> int:
            return len(job.request.prompt_ids) - self._forgiven * (newest - job.seniority)

        return sorted(waiting, key=length)


class FairByTenant:
    """The tenant with the fewest requests admitted and running goes first, then by arrival."""

    def order(self, waiting: Sequence[Job], active: Iterable[Job]) -> Sequence[Job]:
        """Deals the tenants' requests out in turns, the least served tenant first."""
        turns = Counter(job.request.tenant for job in active)
        dealt = []
        for job in waiting:
            dealt.append((turns[job.request.tenant], job.seniority, job))
            turns[job.request.tenant] += 1
        return [job for _, _, job in sorted(dealt, key=lambda entry: entry[:2])]


POLICIES: dict[str, type[Fcfs | PriorityWithAgeing | ShortestFirst | FairByTenant]] = {
    "fcfs": Fcfs,
    "priority": PriorityWithAgeing,
    "shortest": ShortestFirst,
    "fair": FairByTenant,
}
