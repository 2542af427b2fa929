"""Policies that choose the workers of a job among those that have capacity for it.

`least_work` and `round_robin` know nothing of what workers hold. `cost` does
(`router.placement.cost`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from router.placement.placing import (
    LocalReason,
    MixedChunk,
    finish_s,
    rate_of_unmeasured,
    soonest,
    takeover_tokens,
)
from router.placement.ways import Way

if TYPE_CHECKING:
    from router.jobs import Demand
    from router.settings import LocalPrefill
    from router.workers.link import WorkerLink
    from router.workers.load_estimate import Capacity


class Policy(Protocol):
    """Chooses a worker and never refuses. There is at least one candidate, and all have capacity.

    `everyone` are all workers of the demand's model. They may hold pages of the prompt.
    """

    name: str

    def look(self, demand: Demand) -> None:
        """Looks up who holds what of a prompt, for the calls that follow."""
        ...

    def holders(self, demand: Demand) -> Sequence[str]:
        """Names of the few workers that hold most of a prompt."""
        ...

    def prefill(
        self, demand: Demand, candidates: Sequence[WorkerLink], everyone: Sequence[WorkerLink]
    ) -> int:
        """Index of the worker that computes the prompt."""
        ...

    def decode(self, demand: Demand, candidates: Sequence[WorkerLink]) -> int:
        """Index of the worker that decodes."""
        ...

    def whole(
        self, demand: Demand, candidates: Sequence[WorkerLink], everyone: Sequence[WorkerLink]
    ) -> int:
        """Index of the decode worker that runs the whole job, since no other can."""
        ...

    def local(
        self,
        demand: Demand,
        candidates: Sequence[WorkerLink],
        rivals: Sequence[WorkerLink],
        everyone: Sequence[WorkerLink],
        mode: LocalPrefill,
    ) -> tuple[int, LocalReason] | None:
        """Index of the decode worker that runs the whole job, since its first token is sooner than
        that of every rival, and why; None if it is not. `mode` is `cached` or `auto`."""
        ...

    def way(self, demand: Demand, worker: WorkerLink, everyone: Sequence[WorkerLink]) -> Way:
        """How the worker that was chosen comes by the first token."""
        ...

    def takeover_tokens(
        self,
        demand: Demand,
        way: Way,
        prefill: WorkerLink,
        decode: WorkerLink,
        everyone: Sequence[WorkerLink],
    ) -> int:
        """The most tokens of a prompt that a decode worker may compute and be as soon as the
        prefill worker on its way."""
        ...

    def routed(self, demand: Demand, worker: WorkerLink) -> None:
        """The worker computes the prompt from now on, or has got its pages by a hand-off."""
        ...

    def failed(self, demand: Demand, workers: Iterable[WorkerLink]) -> None:
        """The attempt at these workers failed or was left, or another worker took the prompt over:
        they may never have its pages. `demand` is the one that `routed` got, not an equal."""
        ...

    def held_elsewhere(self, demand: Demand, others: Sequence[WorkerLink], granted: int) -> int:
        """The most leading pages of a prompt that others hold now. `granted` are those that the
        decode worker of the attempt held when it granted the rest."""
        ...


class _Unaware:
    """The parts of a policy that knows nothing of what workers hold."""

    def look(self, demand: Demand) -> None:
        """Knows nothing."""

    def holders(self, demand: Demand) -> Sequence[str]:
        """Knows of none."""
        return ()

    def routed(self, demand: Demand, worker: WorkerLink) -> None:
        """Remembers nothing."""

    def failed(self, demand: Demand, workers: Iterable[WorkerLink]) -> None:
        """Forgets nothing."""

    def held_elsewhere(self, demand: Demand, others: Sequence[WorkerLink], granted: int) -> int:
        """Counts none."""
        return 0

    def way(self, demand: Demand, worker: WorkerLink, everyone: Sequence[WorkerLink]) -> Way:
        """The worker computes the whole prompt behind its queue."""
        capacity = worker.capacity()
        unmeasured = rate_of_unmeasured([capacity])
        return Way(finish_s(capacity, demand.prompt_tokens, unmeasured))

    def takeover_tokens(
        self,
        demand: Demand,
        way: Way,
        prefill: WorkerLink,
        decode: WorkerLink,
        everyone: Sequence[WorkerLink],
    ) -> int:
        """See `router.placement.placing`. Nothing is known of the delay of streams."""
        unmeasured = rate_of_unmeasured([prefill.capacity()])
        tokens = demand.prompt_tokens
        return takeover_tokens(decode.capacity(), MixedChunk(), way.seconds, tokens, unmeasured)

    def local(
        self,
        demand: Demand,
        candidates: Sequence[WorkerLink],
        rivals: Sequence[WorkerLink],
        everyone: Sequence[WorkerLink],
        mode: LocalPrefill,
    ) -> tuple[int, LocalReason] | None:
        """The decode worker that would finish the whole prompt first, where `mode` is `auto`."""
        if mode != "auto":
            return None
        tokens = demand.prompt_tokens
        others = [worker.capacity() for worker in rivals]
        unmeasured = rate_of_unmeasured(others)
        capacities = [worker.capacity() for worker in candidates]
        first = soonest(capacities, tokens, unmeasured)
        rival_s = min(finish_s(rival, tokens, unmeasured) for rival in others)
        if finish_s(capacities[first], tokens, unmeasured) >= rival_s:
            return None
        return first, LocalReason.FASTER


class LeastWork(_Unaware):
    """Chooses the worker with the least work.

    Prefill: the worker that finishes the prompt first (`router.placement.placing`).

    Decode: the worker with the least pressure. The pressure is the used share of slots or of pages,
    whichever is larger: a step's time grows with the batch, and pages run out before slots if
    contexts are long. On a tie it is the worker with fewer running sequences.
    """

    name = "least_work"

    def prefill(
        self, demand: Demand, candidates: Sequence[WorkerLink], everyone: Sequence[WorkerLink]
    ) -> int:
        """Index of the worker that finishes the prompt first."""
        capacities = [worker.capacity() for worker in candidates]
        return soonest(capacities, demand.prompt_tokens, rate_of_unmeasured(capacities))

    def decode(self, demand: Demand, candidates: Sequence[WorkerLink]) -> int:
        """Index of the worker under the least pressure."""
        pressures = [pressure(worker.capacity()) for worker in candidates]
        return pressures.index(min(pressures))

    def whole(
        self, demand: Demand, candidates: Sequence[WorkerLink], everyone: Sequence[WorkerLink]
    ) -> int:
        """Index of the worker under the least pressure."""
        return self.decode(demand, candidates)


class RoundRobin(_Unaware):
    """Takes each worker in turn, by name. It ignores load and serves for comparisons."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last = {"prefill": "", "decode": ""}

    def prefill(
        self, demand: Demand, candidates: Sequence[WorkerLink], everyone: Sequence[WorkerLink]
    ) -> int:
        """Index of the next worker."""
        return self._next("prefill", candidates)

    def decode(self, demand: Demand, candidates: Sequence[WorkerLink]) -> int:
        """Index of the next worker."""
        return self._next("decode", candidates)

    def whole(
        self, demand: Demand, candidates: Sequence[WorkerLink], everyone: Sequence[WorkerLink]
    ) -> int:
        """Index of the next worker."""
        return self._next("decode", candidates)

    def _next(self, leg: str, candidates: Sequence[WorkerLink]) -> int:
        names = [worker.worker_id for worker in candidates]
        later = [name for name in names if name > self._last[leg]]
        self._last[leg] = min(later or names)
        return names.index(self._last[leg])


def pressure(capacity: Capacity) -> tuple[float, int]:
    """The used share of slots or pages, whichever is larger; and the running sequences."""
    used_slots = capacity.running_sequences / max(1, capacity.max_sequences)
    used_pages = 1 - capacity.free_pages / max(1, capacity.total_pages)
    return max(used_slots, used_pages), capacity.running_sequences
