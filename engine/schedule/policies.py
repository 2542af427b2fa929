"""The order in which waiting requests are considered for admission."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from engine.schedule.sequences import ActiveRequest

AGEING: Final = 64
"""So many later arrivals are worth a level of priority. It was not tuned."""
FORGIVEN_TOKENS: Final = 16
"""Each later arrival is worth so many tokens of a prompt. It was not tuned."""


class SchedulingPolicy(Protocol):
    """Orders waiting requests. Admission may pass over a request that does not fit, a bounded
    number of times."""

    def order(
        self, waiting: Sequence[ActiveRequest], in_slots: Iterable[ActiveRequest]
    ) -> Sequence[ActiveRequest]:
        """The waiting requests (given in order of arrival), most urgent first. `in_slots` are the
        requests in slots: they run, or wait for their KV."""
        ...

    def admitted(self, active: ActiveRequest) -> None:
        """The request got a slot."""
        return


class Fcfs(SchedulingPolicy):
    """First come, first served."""

    def order(
        self, waiting: Sequence[ActiveRequest], in_slots: Iterable[ActiveRequest]
    ) -> Sequence[ActiveRequest]:
        """In order of arrival."""
        return waiting


class PriorityWithAgeing(SchedulingPolicy):
    """Higher priority first. A request gains one level for every `AGEING` requests that arrived
    after it, so none starves."""

    def order(
        self, waiting: Sequence[ActiveRequest], in_slots: Iterable[ActiveRequest]
    ) -> Sequence[ActiveRequest]:
        """By priority plus age; ties by arrival."""
        newest = max((active.seniority for active in waiting), default=0)

        def urgency(active: ActiveRequest) -> float:
            return -(active.request.priority + (newest - active.seniority) / AGEING)

        return sorted(waiting, key=urgency)


class ShortestFirst(SchedulingPolicy):
    """Fewest prompt tokens first. A request counts as `FORGIVEN_TOKENS` shorter for each later
    arrival."""

    def order(
        self, waiting: Sequence[ActiveRequest], in_slots: Iterable[ActiveRequest]
    ) -> Sequence[ActiveRequest]:
        """By aged length; ties by arrival."""
        newest = max((active.seniority for active in waiting), default=0)

        def length(active: ActiveRequest) -> int:
            return len(active.request.prompt_ids) - FORGIVEN_TOKENS * (newest - active.seniority)

        return sorted(waiting, key=length)


class FairByTenant(SchedulingPolicy):
    """The tenant with the fewest requests in slots goes first. On a tie it is the tenant whose last
    turn was longest ago, then the earlier arrival. The tie rule is for workers with few requests in
    slots, such as prefill workers, where a flood of one tenant would go first otherwise."""

    def __init__(self) -> None:
        self._turns = 0
        self._last_turn: dict[str, int] = {}
        """Last turn of each tenant. The operator of the router names the tenants, so they are
        few."""

    def order(
        self, waiting: Sequence[ActiveRequest], in_slots: Iterable[ActiveRequest]
    ) -> Sequence[ActiveRequest]:
        """Deals the tenants' requests out in turns."""
        held = Counter(active.request.tenant for active in in_slots)
        dealt = []
        for active in waiting:
            tenant = active.request.tenant
            dealt.append((held[tenant], self._last_turn.get(tenant, 0), active.seniority, active))
            held[tenant] += 1
        return [active for *_, active in sorted(dealt, key=lambda entry: entry[:3])]

    def admitted(self, active: ActiveRequest) -> None:
        """Notes the tenant's turn."""
        self._turns += 1
        self._last_turn[active.request.tenant] = self._turns


POLICIES: dict[str, type[Fcfs | PriorityWithAgeing | ShortestFirst | FairByTenant]] = {
    "fcfs": Fcfs,
    "priority": PriorityWithAgeing,
    "shortest": ShortestFirst,
    "fair": FairByTenant,
}
